"""From a manifest and a skeleton to windows of strided copies. Pure: nothing is opened here."""
