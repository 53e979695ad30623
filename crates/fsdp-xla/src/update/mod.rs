//! Update rules: within a schedule, one pass over whole shards, the same on every rank; outside of it, those of the
//! host.
//!
//! Ranks hold different parameters, whose learning rates and weight decay may differ. If they do, a rank looks up its
//! rows in a table, which is an argument. Adafactor has more tables, for the placement of its state: its lengths differ
//! between ranks, and programs use the largest.

mod adafactor;
mod by_param;
mod direction;
mod elementwise;
mod factored;
mod on_host;
mod places;
mod rules;

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::update::{AdamW, AdamW8bit, Ema, Lion, Muon, Sgd};

use crate::buffer::XlaBuffer;
use crate::memory::XlaMemory;
use rules::Traced;

macro_rules! compiled {
    ($($rule:ty),*) => {$(
        impl UpdateRule<XlaMemory> for $rule {
            fn update(
                &mut self,
                memory: &XlaMemory,
                shard: &mut SegmentShard<'_, XlaBuffer>,
                scalars: &StepScalars<'_, XlaBuffer>,
                _statistics: &[XlaBuffer],
            ) -> Result<(), Error> {
                if memory.is_tracing() {
                    return Traced::update(self, memory, shard, scalars);
                }
                on_host::with_host_shard(memory, shard, scalars, |host, shard, scalars| {
                    self.update(host, shard, scalars, &[])
                })
            }
        }
    )*};
}

compiled!(AdamW, Sgd, Lion, Ema);

/// Rules that cannot be compiled. Run files that select them are rejected before ranks start.
macro_rules! missing {
    ($($rule:ty, $name:literal;)*) => {$(
        impl UpdateRule<XlaMemory> for $rule {
            fn update(
                &mut self,
                _memory: &XlaMemory,
                _shard: &mut SegmentShard<'_, XlaBuffer>,
                _scalars: &StepScalars<'_, XlaBuffer>,
                _statistics: &[XlaBuffer],
            ) -> Result<(), Error> {
                let message = concat!("XLA devices have adamw, sgd, lion and adafactor, but not ", $name);
                Err(Error::Refused(message.into()))
            }
        }
    )*};
}

missing! {
    AdamW8bit, "adamw8bit";
    Muon, "muon";
}
