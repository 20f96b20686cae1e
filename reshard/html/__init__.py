"""HTML reports: one self-contained file each, which any browser opens offline.

shards    which bytes of a checkpoint are in which file, rank by rank, in a compact form
curves    losses of several runs, and the differences between them
bars      stacked bars of sizes
page      the parts of a page
pages, plan_pages, check_pages
          the page of each command's report
document  rendering a page as one file, and writing it
"""
