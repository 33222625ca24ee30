"""Files that are written durably and verified when they are read: their checksums, locks and shards."""
