//! Checks the results of programs, on a CPU plugin (`FSDP_TEST_PJRT` is the path of its library).

mod collectives;
mod scalars;
mod updates;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, Launcher};
use fsdp_core::comm::CommError;
use fsdp_core::memory::{Arithmetic, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_nn::backend::{Backend, HeadChunks, Operands, Outcome};
use fsdp_nn::conformance::{Subject, operations};
use fsdp_nn::op::Op;
use fsdp_nn::update::Part;
use fsdp_sim::ThreadOptions;

use crate::buffer::XlaBuffer;
use crate::memory::{In, Out, TraceEvent, XlaMemory};
use crate::{Devices, ProgramForm, ProgramOptions, Reduction};

/// A launcher on the plugin's devices; `None` without a plugin to test with.
fn devices(test: &str, ranks: usize, reduction: Reduction) -> Option<Devices> {
    let Some(plugin) = std::env::var_os("FSDP_TEST_PJRT").map(PathBuf::from) else {
        println!("skipped: {test} needs a PJRT plugin for processors, named by FSDP_TEST_PJRT");
        return None;
    };
    let threads = ThreadOptions { timeout: Duration::from_secs(300), ..ThreadOptions::default() };
    let form = ProgramForm { reduction, ..ProgramForm::default() };
    let programs = ProgramOptions { form, ..ProgramOptions::default() };
    Some(Devices::new(&plugin, ranks, programs, threads).unwrap())
}

/// Runs `body` with the memory of one rank, if there is a plugin to test with.
pub(super) fn with_memory(test: &str, body: impl Fn(&Arc<XlaMemory>) + Sync) {
    let Some(devices) = devices(test, 1, Reduction::Tree) else { return };
    let run = |seat: fsdp_comm::launch::Seat<XlaMemory>| -> Result<(), Error> {
        body(&seat.memory);
        Ok(())
    };
    devices.launch(1, &run).unwrap();
}

/// A memory that runs each operation as a program.
#[derive(Clone)]
struct Compiled {
    memory: Arc<XlaMemory>,
    /// Maximum bytes of attention scores at a time; if set, only attention is compiled, and other operations run on the
    /// host.
    scores_max_bytes: Option<usize>,
}

impl Memory for Compiled {
    type Buffer = XlaBuffer;
    type Event = TraceEvent;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<XlaBuffer, Error> {
        self.memory.allocate(category, dtype, len)
    }

    fn release(&self, queue: Queue, buffer: &mut XlaBuffer) {
        self.memory.release(queue, buffer);
    }

    fn alias(&self, dst: &mut XlaBuffer, src: &XlaBuffer) -> bool {
        self.memory.alias(dst, src)
    }

    fn zero(&self, queue: Queue, dst: Out<'_>) -> Result<(), Error> {
        self.memory.zero(queue, dst)
    }

    fn copy(&self, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        self.memory.copy(queue, src, dst)
    }

    fn compute(&self, queue: Queue, operation: Arithmetic<'_, In<'_>>, dst: Out<'_>) -> Result<(), Error> {
        self.memory.compute(queue, operation, dst)
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: Out<'_>) -> Result<(), Error> {
        self.memory.write(queue, src, dst)
    }

    fn read(&self, queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        self.memory.read(queue, src, dst)
    }

    fn record(&self, queue: Queue) -> TraceEvent {
        self.memory.record(queue)
    }

    fn wait(&self, queue: Queue, event: &TraceEvent) {
        self.memory.wait(queue, event);
    }

    fn usage(&self) -> Usage {
        self.memory.usage()
    }
}

impl Backend for Compiled {
    fn execute(&self, op: &Op, operands: Operands<'_, '_, XlaBuffer>) -> Result<Outcome, Error> {
        // There are no rules for these, but the suite covers all operations.
        if matches!(op, Op::Experts(_) | Op::Latent(_) | Op::Delta(_) | Op::Dequantize(_))
            || self.scores_max_bytes.is_some() && !matches!(op, Op::Attention(_))
        {
            return self.memory.execute(op, operands);
        }
        self.memory.begin_schedule();
        if let Some(bytes) = self.scores_max_bytes {
            self.memory.lock().as_mut().expect("a schedule has begun").scores_max_bytes = bytes;
        }
        let outcome = self.memory.execute(op, operands)?;
        self.memory.end_schedule()?;
        Ok(outcome)
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, XlaBuffer>,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<Outcome, Error> {
        self.memory.update(part, stage, shard, scalars)
    }

    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Small
    }
}

/// The suite of backends.
fn expect_operations(scores_max_bytes: Option<usize>) {
    with_memory("this test", |memory| {
        let subject = Subject {
            memory: &|| Compiled { memory: Arc::clone(memory), scores_max_bytes },
            rounds_probabilities: true,
            adds_alike: true,
        };
        operations(&subject);
    });
}

#[test]
fn operations_pass_backend_suite() {
    expect_operations(None);
}

/// In the suite's cases, short sequences are a single block, those of 67 positions a loop over samples, and those of
/// 150 and 160 one over queries.
#[test]
fn blocked_attention_passes_backend_suite() {
    expect_operations(Some(100_000));
}

#[test]
fn program_differing_on_one_rank_is_rejected() {
    let Some(devices) = devices("this test", 3, Reduction::Tree) else { return };
    let run = |seat: fsdp_comm::launch::Seat<XlaMemory>| -> Result<(), Error> {
        let memory = &seat.memory;
        let mut buffer = memory.allocate(Category::Unsharded, DType::F32, 2)?;
        memory.write(Queue::Compute, HostSlice::F32(&[1.0, 2.0]), SliceMut::whole(&mut buffer))?;
        memory.begin_schedule();
        let factor = if seat.rank.0 == 1 { 3.0 } else { 2.0 };
        memory.compute(Queue::Compute, Arithmetic::Scale(factor), SliceMut::whole(&mut buffer))?;
        memory.end_schedule()
    };
    let failure = devices.launch(3, &run).unwrap_err();
    let FailureReason::Error(Error::Comm(error)) = failure.reason else { panic!("{failure:?}") };
    assert_eq!(error, CommError::Differs { ranks: vec![Rank(1)], reference: Rank(0) });
}

#[test]
fn copy_part_copies_part_at_every_index() {
    with_memory("this test", |memory| {
        let buffer = |len| memory.allocate(Category::Unsharded, DType::F32, len).unwrap();
        let (mut whole, mut part) = (buffer(6), buffer(2));
        memory
            .write(
                Queue::Compute,
                HostSlice::F32(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
                SliceMut::whole(&mut whole),
            )
            .unwrap();
        for index in 0..3 {
            memory.begin_schedule();
            memory.copy_part(Queue::Compute, &whole, index, &mut part).unwrap();
            memory.end_schedule().unwrap();
            let mut found = [0.0; 2];
            memory.read(Queue::Compute, Slice::whole(&part), HostSliceMut::F32(&mut found)).unwrap();
            assert_eq!(found, [2.0 * index as f32, 2.0 * index as f32 + 1.0]);
        }
    });
}
