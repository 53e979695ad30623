//! Single rules of the protocol, each in the smallest world that shows it.
