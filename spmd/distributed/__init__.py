"""Many processes: who am I, do we agree, is everyone still there."""
