"""What goes to disk, in whose layout, and how it appears whole or not at all."""
