//! Adafactor: its statistics are sums that stay on the device, so the host does not wait.

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::HostBuffer;
use fsdp_nn::update::Adafactor;

use super::factored::{Pass, parts};
use super::on_host::with_host_shard;
use super::runs::refresh;
use crate::device::{CudaBuffer, CudaMemory, put_back, readable, take};

impl UpdateRule<CudaMemory> for Adafactor {
    fn statistics(
        &mut self,
        memory: &CudaMemory,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        earlier: &[CudaBuffer],
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        if shard.params.is_on_host() {
            let earlier = copies(memory, earlier)?;
            let mut host_sums = take(memory, sums)?;
            let result = with_host_shard(memory, shard, scalars, |host, shard, scalars| {
                self.statistics(host, shard, scalars, &earlier, &mut host_sums)
            });
            return put_back(memory, host_sums, sums).and(result);
        }
        let pass = Pass::new(memory, shard, scalars)?;
        for part in parts(self, shard.pieces, scalars) {
            match earlier {
                [] => pass.moments(&part, shard, sums)?,
                [moments, ..] => pass.norms(&part, shard, moments, sums)?,
            }
        }
        Ok(())
    }

    fn update(
        &mut self,
        memory: &CudaMemory,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        statistics: &[CudaBuffer],
    ) -> Result<(), Error> {
        let [moments, norms] = statistics else {
            panic!("{} phases of statistics where the rule declared {}", statistics.len(), Self::PHASES);
        };
        if shard.params.is_on_host() {
            let statistics = copies(memory, statistics)?;
            return with_host_shard(memory, shard, scalars, |host, shard, scalars| {
                self.update(host, shard, scalars, &statistics)
            });
        }
        let pass = Pass::new(memory, shard, scalars)?;
        for part in parts(self, shard.pieces, scalars) {
            pass.update(&part, shard, [moments, norms])?;
        }
        refresh(memory, shard)
    }
}

/// The sums, readable by the host's rule.
fn copies(memory: &CudaMemory, sums: &[CudaBuffer]) -> Result<Vec<HostBuffer>, Error> {
    sums.iter().map(|sums| readable(memory, sums)).collect()
}
