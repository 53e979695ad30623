//! Archives by hand around pickles by hand: storages that lie, and views that reach too far.
