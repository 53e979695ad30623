//! Tests of the protocol in a simulated world; see [`sim`].

mod check;
mod exhaustive;
mod faults;
mod rules;
mod seeds;
mod sim;
