//! Muon: not supported on GPUs yet. Run files that ask for it are rejected before ranks start.

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::update::Muon;

use crate::device::{CudaBuffer, CudaMemory};

impl UpdateRule<CudaMemory> for Muon {
    fn update(
        &mut self,
        _memory: &CudaMemory,
        _shard: &mut SegmentShard<'_, CudaBuffer>,
        _scalars: &StepScalars<'_, CudaBuffer>,
        _statistics: &[CudaBuffer],
    ) -> Result<(), Error> {
        let message =
            "Muon does not run on GPUs; train on device \"cpu\" or \"torch-cpu\", or use another optimizer";
        Err(Error::Refused(message.into()))
    }
}
