"""Reports that people look at: one HTML file each, which needs nothing but a browser.

shards    where the bytes of a checkpoint lie, rank by rank, small enough to embed
curves    losses of several runs, and how far they are apart
page      what a page is made of
pages, proof_pages
          the page of each command's report
document  a page as one file, and the file on disk
"""
