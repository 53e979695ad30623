//! Adafactor; the program returns its statistics as well.

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::HostBuffer;
use fsdp_nn::update::Adafactor;

use super::factored::Pass;
use super::on_host::with_host_shard;
use crate::buffer::{Content, XlaBuffer};
use crate::memory::XlaMemory;

impl UpdateRule<XlaMemory> for Adafactor {
    fn statistics(
        &mut self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
        earlier: &[XlaBuffer],
        sums: &mut XlaBuffer,
    ) -> Result<(), Error> {
        if let Some(trace) = &mut *memory.lock() {
            let pass = Pass::new(self, trace, shard, scalars);
            match earlier {
                [] => pass.moments(sums),
                [moments, ..] => pass.norms(moments, sums),
            }
            return Ok(());
        }
        let earlier = host_copies(memory, earlier)?;
        let mut found = memory.take_to_host(sums)?;
        let result = with_host_shard(memory, shard, scalars, |host, shard, scalars| {
            self.statistics(host, shard, scalars, &earlier, &mut found)
        });
        sums.storage.put(Content::Host(found));
        result
    }

    fn update(
        &mut self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
        statistics: &[XlaBuffer],
    ) -> Result<(), Error> {
        let [moments, norms] = statistics else {
            panic!("{} phases of statistics where the rule declared {}", statistics.len(), Self::PHASES);
        };
        if memory.is_tracing() {
            if let Some(trace) = &mut *memory.lock() {
                Pass::new(self, trace, shard, scalars).update(moments, norms);
            }
            return shard.refresh(memory);
        }
        let statistics = host_copies(memory, statistics)?;
        with_host_shard(memory, shard, scalars, |host, shard, scalars| {
            self.update(host, shard, scalars, &statistics)
        })
    }
}

/// Host copies of sums, for the host's rule.
fn host_copies(memory: &XlaMemory, sums: &[XlaBuffer]) -> Result<Vec<HostBuffer>, Error> {
    sums.iter().map(|sums| memory.on_host(sums)).collect()
}
