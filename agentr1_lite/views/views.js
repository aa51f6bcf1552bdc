// One viewer: colours its tokens by the chosen quantity, shows one token's numbers, moves by key.
for (const view of document.querySelectorAll(".ar1-view:not(.live)")) {
  view.classList.add("live");
  const data = JSON.parse(view.querySelector('script[type="application/json"]').textContent);
  const tokens = [...view.querySelectorAll(".flow .t")], info = view.querySelector(".info");
  const select = view.querySelector("select"), sources = { p: "prompt", a: "action", s: "seam", o: "observation" };
  const place = new Map(tokens.map((token, i) => [token, i])), texts = tokens.map((token) => token.textContent);
  const shown = (x) => (x === null || x === undefined ? "none" : String(x).replace("-", "−"));
  const open = (i) => !tokens[i].closest("details:not([open])");
  const colours = ["p", "n", "z", "sp", "sa", "ss", "so"];
  let picked = Math.max(0, data.source.indexOf("a"));

  const paint = () => {
    const q = data.q[select.value];
    tokens.forEach((token, i) => {
      token.classList.remove(...colours);
      const v = q.v[i], level = v === null || v === undefined ? 0 : (v - q.centre) / q.span;
      if (q.kind === "source") token.classList.add("s" + data.source[i]);
      else if (Math.abs(level) >= 0.005) {
        token.classList.add(q.kind === "size" ? "z" : level > 0 ? "p" : "n");
        token.style.setProperty("--m", Math.min(1, Math.abs(level)).toFixed(2));
      }
    });
    for (const legend of view.querySelectorAll(".legend")) legend.hidden = legend.dataset.q !== select.value;
    describe(picked);
  };

  const describe = (i) => {
    if (!tokens[i]) return;
    const turn = data.turn[i] < 0 ? "" : `, turn ${data.turn[i] + 1}`;
    const head = document.createElement("p"), text = document.createElement("code"), list = document.createElement("section");
    text.textContent = texts[i].replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "→");
    const side = tokens[i].closest("[data-side]")?.dataset.side ?? "";
    head.append(text, ` ${side}token ${data.t[i]}, id ${data.ids[i]}, ${sources[data.source[i]]}${turn}`);
    for (const [name, q] of Object.entries(data.q)) {
      if (q.kind === "source") continue;
      const item = document.createElement("div"), term = document.createElement("i"), value = document.createElement("span");
      term.textContent = q.label;
      value.textContent = shown(q.v[i]) + (q.unit && q.v[i] !== null ? " " + q.unit : "");
      item.classList.toggle("now", name === select.value);
      item.append(term, value);
      list.append(item);
    }
    info.replaceChildren(head, list);
  };

  const pick = (i) => {
    if (tokens[picked]) tokens[picked].removeAttribute("tabindex");
    picked = i;
    tokens[i].tabIndex = 0;
    tokens[i].focus({ preventScroll: true });
    tokens[i].scrollIntoView({ block: "nearest" });
    describe(i);
  };

  const step = (by) => {
    let i = picked + by;
    while (tokens[i] && !open(i)) i += by;
    return i;
  };
  const block = (i) => tokens[i]?.closest(".turn"), side = (i) => tokens[i]?.closest("[data-side]");
  const leap = (by) => { // to the first token of the next turn, on the same side where there are two
    const here = side(picked)?.dataset.side;
    let i = picked;
    while (tokens[i] && (block(i) === block(picked) || side(i)?.dataset.side !== here || !open(i))) i += by;
    while (tokens[i - 1] && block(i - 1) === block(i) && side(i - 1) === side(i)) i -= 1;
    return i;
  };
  const keys = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => leap(1), ArrowUp: () => leap(-1),
    PageDown: () => leap(1), PageUp: () => leap(-1),
    Home: () => tokens.findIndex((_, i) => open(i)), End: () => tokens.findLastIndex((_, i) => open(i)),
  };

  const flow = view.querySelector(".flow");
  flow.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || !place.has(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const i = keys[event.key]();
    if (tokens[i]) pick(i);
  });
  flow.addEventListener("click", (event) => place.has(event.target) && pick(place.get(event.target)));
  flow.addEventListener("mouseover", (event) => place.has(event.target) && describe(place.get(event.target)));
  flow.addEventListener("mouseleave", () => describe(picked));
  select.addEventListener("change", paint);
  view.querySelector(".blank").addEventListener("change", (event) => {
    tokens.forEach((token, i) => {
      const text = texts[i];
      token.textContent = event.target.checked
        ? text.replace(/ /g, "·\u200b").replace(/\t/g, "→\t").replace(/\n/g, "↵\n") : text;
    });
  });
  if (tokens[picked]) tokens[picked].tabIndex = 0;
  describe(picked);
}
