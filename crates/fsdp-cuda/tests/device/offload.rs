//! Buffers in pinned memory: the host's kernels run on them once the earlier work of their queue is done, and the
//! device copies from and to them.

use fsdp_core::memory::{Arithmetic, Category, Memory, Rows, Slice, SliceMut};
use fsdp_core::{DType, ExactSum, Queue};
use fsdp_cuda::{CudaBuffer, CudaMemory};

use crate::fake_cuda;
use crate::subject::cuda_on;
use crate::values::*;

const Q: Queue = Queue::Compute;
const LEN: usize = 777;

fn buffer(memory: &CudaMemory, pinned: bool, dtype: DType, numbers: &[f64]) -> CudaBuffer {
    let category = Category::OptimizerState;
    let mut buffer = if pinned {
        memory.allocate_host(category, dtype, numbers.len()).unwrap()
    } else {
        memory.allocate(category, dtype, numbers.len()).unwrap()
    };
    assert_eq!(buffer.is_on_host(), pinned);
    memory.write(Q, fsdp_core::memory::HostSlice::F64(numbers), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

#[test]
fn operations_match_host_bitwise_for_any_buffer_placement() {
    for seed in 0..10 {
        let memory = &cuda_on(fake_cuda::device().seed(seed));
        let host = &host();
        let (a, b) = (normal(1, LEN), normal(2, LEN));
        for (from, to) in [(DType::F32, DType::F32), (DType::F32, DType::Bf16), (DType::Bf16, DType::F32)] {
            let src = filled(host, from, &a);
            let mut expected = room(host, to, LEN);
            host.copy(Q, Slice::whole(&src), SliceMut::whole(&mut expected)).unwrap();
            for (src_pinned, dst_pinned) in [(false, false), (false, true), (true, false), (true, true)] {
                let src = buffer(memory, src_pinned, from, &a);
                let mut dst = buffer(memory, dst_pinned, to, &b);
                memory.copy(Q, Slice::whole(&src), SliceMut::whole(&mut dst)).unwrap();
                let what = format!("{from} to {to}, {src_pinned} to {dst_pinned}, seed {seed}");
                assert_bits(&values(memory, &dst), &values(host, &expected), &what);
            }
        }
        for dtype in FLOATS {
            let src = filled(host, dtype, &a);
            let mut expected = filled(host, dtype, &b);
            host.compute(Q, Arithmetic::Accumulate(Slice::whole(&src)), SliceMut::whole(&mut expected))
                .unwrap();
            let rows = [Rows { offset: 0, len: LEN, row_len: 7 }];
            for (src_pinned, dst_pinned) in [(false, true), (true, false), (true, true)] {
                let src = buffer(memory, src_pinned, dtype, &a);
                let mut dst = buffer(memory, dst_pinned, dtype, &b);
                let added = Arithmetic::Accumulate(Slice::whole(&src));
                memory.compute(Q, added, SliceMut::whole(&mut dst)).unwrap();
                assert_bits(&values(memory, &dst), &values(host, &expected), &format!("sum of {dtype}"));
                let mut sum = integers(memory, &[0; ExactSum::WORDS]);
                let squares = Arithmetic::SquareSum(Slice::whole(&dst), &rows);
                memory.compute(Q, squares, SliceMut::whole(&mut sum)).unwrap();
                let mut expected_sum = integers(host, &[0; ExactSum::WORDS]);
                let squares = Arithmetic::SquareSum(Slice::whole(&expected), &rows);
                host.compute(Q, squares, SliceMut::whole(&mut expected_sum)).unwrap();
                let [sum, expected] = [words(memory, &sum), words(host, &expected_sum)]
                    .map(|words| ExactSum::from_words(&words).value());
                assert_eq!(sum, expected);
            }
        }
    }
}

/// The host works on pinned memory only after the earlier work of its queue, including waits for other queues.
#[test]
fn host_work_on_pinned_memory_waits_for_queue() {
    for seed in 0..50 {
        let memory = &cuda_on(fake_cuda::device().seed(seed));
        let gradient = buffer(memory, false, DType::F32, &[1.0; LEN]);
        let mut pinned = buffer(memory, true, DType::F32, &[0.0; LEN]);
        let mut total = buffer(memory, true, DType::F32, &[10.0; LEN]);
        let mut shard = buffer(memory, false, DType::F32, &[0.0; LEN]);
        memory.wait(Queue::Download, &memory.record(Q));
        memory.copy(Queue::Download, Slice::whole(&gradient), SliceMut::whole(&mut pinned)).unwrap();
        memory.wait(Q, &memory.record(Queue::Download));
        memory
            .compute(Q, Arithmetic::Accumulate(Slice::whole(&pinned)), SliceMut::whole(&mut total))
            .unwrap();
        memory.wait(Queue::Upload, &memory.record(Q));
        memory.copy(Queue::Upload, Slice::whole(&total), SliceMut::whole(&mut shard)).unwrap();
        memory.wait(Q, &memory.record(Queue::Upload));
        assert_eq!(values(memory, &shard), [11.0; LEN], "seed {seed}");
    }
}
