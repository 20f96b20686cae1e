"""A model cut over ranks that share their data: by tensor, by pipeline stage, by expert.

``grid`` numbers the ranks; ``tensor``, ``pipeline`` and ``experts`` each know one way to cut, on
torch's own parts. ``engines/grid.py`` puts them together.
"""
