"""Exercises of the lessons: a gap to fill, and a check that knows the typical mistakes.

A lesson's file holds a function that draws inputs, the solution, and wrong versions with what to say to each: in a
table where both fit on a line, else as functions whose docstrings say it::

    @exercise(4, inputs=draw)
    def group_advantage(rewards, groups): ...

    @wrong_versions(group_advantage, reread="What a group does")
    class WrongAdvantages:
        def biased(rewards, groups):
            \"""The std divides by n.\"""
            return ...

``check("group_advantage", function)`` runs the learner's function and the solution on the same random inputs. A
mistake is named where the learner's outcome equals that wrong version's on every input. No run is timed:
interrupting the kernel stops an endless loop.
"""

from agentr1_lite.exercises.judge import check
from agentr1_lite.exercises.registry import exercise, mistakes, wrong_versions

__all__ = ["check", "exercise", "mistakes", "wrong_versions"]
