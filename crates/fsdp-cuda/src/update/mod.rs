//! Update rules on a device.
//!
//! AdamW and SGD are one kernel over every run of elements with the same weight decay, and give the bits of the host's
//! rules. They read on the device whether the step was finite, so the host does not wait. Shards in pinned memory are
//! updated by the host's rules, and so is everything under Adafactor, whose shards are copied when they lie on the
//! device.

mod adafactor;
mod adamw;
mod on_host;
mod runs;
mod sgd;
