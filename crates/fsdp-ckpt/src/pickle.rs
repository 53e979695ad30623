//! Pickles, as inert data.
//!
//! A pickle is a program for a stack machine. Here it is only ever data: nothing that it names is looked up or
//! called.

pub(crate) mod writer;
