"""The words of the library, which import nothing else of it: batches, events, progress, settings, generators, texts."""
