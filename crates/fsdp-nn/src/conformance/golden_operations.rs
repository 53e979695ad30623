//! Compares operations with PyTorch in double precision (tests/golden/ops.safetensors).

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Queue};

use super::Subject;
use super::calls::Calls;
use super::golden::close;
use super::models::Packed;
use super::safetensors;
use crate::backend::{AttentionDims, Backend, BatchFacts, HeadDims, IGNORED_TARGET, LinearDims, Orientation};
use crate::layer::Rope;
use crate::op::Scores;

/// The tensors of one case, with a memory and a dtype to run it in.
struct Case<'a, M> {
    tensors: &'a BTreeMap<String, Vec<f64>>,
    name: &'a str,
    memory: &'a M,
    dtype: DType,
    band: f64,
}

/// The backend under test, and the expected tensors.
struct Golden<'a, M> {
    subject: &'a Subject<'a, M>,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl<M: Backend> Golden<'_, M> {
    /// Runs a check on every case, in both precisions that PyTorch's numbers can distinguish.
    fn each(&self, cases: &[&str], check: impl Fn(&Case<'_, M>)) {
        for name in cases {
            for (dtype, band) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
                let memory = &(self.subject.memory)();
                check(&Case { tensors: &self.tensors, name, memory, dtype, band });
            }
        }
    }
}

/// Checks that operations equal PyTorch's, within bands relative to their largest value.
///
/// # Panics
/// If one does not, or `folder` lacks `ops.safetensors`.
pub fn golden_operations<M: Backend>(subject: &Subject<'_, M>, folder: &Path) {
    let golden = Golden { subject, tensors: safetensors::read(&folder.join("ops.safetensors")) };
    rms_norm(&golden);
    layer_norm(&golden);
    attention(&golden);
    rope(&golden);
    activations(&golden);
    linear_maps(&golden);
    embedding(&golden);
    cross_entropy(&golden);
}

impl<M: Backend> Case<'_, M> {
    fn values(&self, tensor: &str) -> &[f64] {
        &self.tensors[&format!("{}.{tensor}", self.name)]
    }

    fn scalar(&self, tensor: &str) -> f64 {
        self.values(tensor)[0]
    }

    fn allocate(&self, len: usize) -> M::Buffer {
        self.memory.allocate(Category::Workspace, self.dtype, len).unwrap()
    }

    fn upload(&self, values: &[f64]) -> M::Buffer {
        let mut buffer = self.allocate(values.len());
        self.memory.write(Queue::Compute, HostSlice::F64(values), SliceMut::whole(&mut buffer)).unwrap();
        buffer
    }

    fn input(&self, tensor: &str) -> M::Buffer {
        self.upload(self.values(tensor))
    }

    fn tokens(&self, tensor: &str) -> M::Buffer {
        let token = |&value: &f64| if value < 0.0 { IGNORED_TARGET } else { value as u32 };
        let tokens: Vec<u32> = self.values(tensor).iter().map(token).collect();
        let mut buffer = self.memory.allocate(Category::Workspace, DType::U32, tokens.len()).unwrap();
        self.memory.write(Queue::Compute, HostSlice::U32(&tokens), SliceMut::whole(&mut buffer)).unwrap();
        buffer
    }

    fn download(&self, buffer: &M::Buffer) -> Vec<f64> {
        let mut values = vec![0.0; buffer.len()];
        let destination = HostSliceMut::F64(&mut values);
        self.memory.read(Queue::Compute, Slice::whole(buffer), destination).unwrap();
        values
    }

    fn expect(&self, tensor: &str, got: &M::Buffer) {
        self.expect_values(tensor, &self.download(got));
    }

    fn expect_values(&self, tensor: &str, got: &[f64]) {
        close(&format!("{}.{tensor} in {}", self.name, self.dtype), got, self.values(tensor), self.band);
    }
}

fn written<B: Buffer>(buffer: &mut B) -> GradientTarget<'_, B> {
    GradientTarget { slice: SliceMut::whole(buffer), accumulate: false }
}

fn all<B: Buffer>(buffer: &B) -> Slice<'_, B> {
    Slice::whole(buffer)
}

fn out<B: Buffer>(buffer: &mut B) -> SliceMut<'_, B> {
    SliceMut::whole(buffer)
}

fn rms_norm<M: Backend>(golden: &Golden<'_, M>) {
    golden.each(&["rms_norm", "rms_norm_odd"], |case| {
        let (x, weight, dy) = (case.input("x"), case.input("weight"), case.input("dy"));
        let (width, eps) = (weight.len(), case.scalar("eps"));
        let (mut y, mut rstd) = (case.allocate(x.len()), case.allocate(x.len() / width));
        let memory = case.memory;
        memory.rms_norm(width, [eps, 0.0], all(&x), all(&weight), out(&mut y), out(&mut rstd)).unwrap();
        case.expect("y", &y);
        let (mut dx, mut dweight) = (case.allocate(x.len()), case.allocate(width));
        let (scale, target) = (all(&weight), Some(written(&mut dweight)));
        memory
            .rms_norm_backward(
                (width, 0.0),
                all(&x),
                scale,
                all(&rstd),
                all(&dy),
                out(&mut dx),
                false,
                target,
            )
            .unwrap();
        case.expect("dx", &dx);
        case.expect("dweight", &dweight);
    });
}

fn layer_norm<M: Backend>(golden: &Golden<'_, M>) {
    golden.each(&["layer_norm", "layer_norm_odd", "layer_norm_flat"], |case| {
        // The mean is large compared to the deviations from it, so their differences lose digits.
        let is_flat = case.name == "layer_norm_flat";
        if is_flat && case.dtype == DType::F32 {
            return;
        }
        let band = if is_flat { 1e-10 } else { case.band };
        let case = &Case { band, ..*case };
        let (x, weight, bias) = (case.input("x"), case.input("weight"), case.input("bias"));
        let (width, eps, dy) = (weight.len(), case.scalar("eps"), case.input("dy"));
        let (mut y, mut stats) = (case.allocate(x.len()), case.allocate(2 * x.len() / width));
        let memory = case.memory;
        let (scale, shift) = (all(&weight), all(&bias));
        memory.layer_norm(width, eps, all(&x), scale, Some(shift), out(&mut y), out(&mut stats)).unwrap();
        case.expect("y", &y);
        let (mut dx, mut dweight) = (case.allocate(x.len()), case.allocate(width));
        let (x, stats, dy) = (all(&x), all(&stats), all(&dy));
        memory.layer_norm_backward_input(width, x, scale, stats, dy, out(&mut dx), false).unwrap();
        memory.layer_norm_backward_weight(width, x, stats, dy, written(&mut dweight)).unwrap();
        case.expect("dx", &dx);
        case.expect("dweight", &dweight);
    });
}

fn attention<M: Backend>(golden: &Golden<'_, M>) {
    let plain = Scores::default();
    let window = |keys| Scores { window: Some(keys), ..plain };
    let packed = Scores { packed: true, ..plain };
    for (name, [batch, seq, heads, kv_heads, head_dim], scores) in [
        ("attention_gqa", [2, 7, 4, 2, 6], plain),
        ("attention_mha", [1, 9, 3, 3, 5], plain),
        ("attention_mqa", [2, 5, 4, 1, 8], plain),
        ("attention_one", [2, 1, 2, 2, 4], plain),
        ("attention_sharp", [1, 6, 2, 1, 4], plain),
        ("attention_window", [2, 9, 4, 2, 6], window(4)),
        ("attention_window_two", [1, 5, 2, 1, 4], window(2)),
        ("attention_scale", [2, 6, 2, 2, 6], Scores { scale: Some(0.3), ..plain }),
        ("attention_documents", [2, 9, 4, 2, 6], packed),
        ("attention_documents_window", [1, 9, 2, 1, 4], Scores { window: Some(2), ..packed }),
    ] {
        let packed = Packed { dims: AttentionDims { batch, seq, heads, kv_heads, head_dim } };
        let dims = packed.dims;
        // In every sample, documents of 4, 1 and 4 positions.
        let starts = |sample| [0, 4, 5, 9].map(|start| sample * seq + start);
        let documents: Vec<_> = (0..batch)
            .flat_map(|sample| starts(sample).windows(2).map(|at| at[0]..at[1]).collect::<Vec<_>>())
            .collect();
        let facts = (scores, BatchFacts { documents: &documents, ..BatchFacts::default() });
        golden.each(&[name], |case| {
            // Scores in the hundreds have a relative error of 1e-7 in single precision, times the score.
            let band = if name == "attention_sharp" { 50.0 * case.band } else { case.band };
            let case = &Case { band, ..*case };
            let qkv = case.upload(&packed.pack(["q", "k", "v"].map(|tensor| case.values(tensor))));
            let dy = case.input("dy");
            let (mut y, mut lse) = (case.allocate(dy.len()), case.allocate(dims.rows() * heads));
            case.memory.attention(dims, facts, all(&qkv), out(&mut y), out(&mut lse)).unwrap();
            case.expect("y", &y);
            let mut dqkv = case.allocate(qkv.len());
            let (qkv, y, lse, dy) = (all(&qkv), all(&y), all(&lse), all(&dy));
            case.memory.attention_backward(dims, facts, qkv, y, lse, dy, out(&mut dqkv)).unwrap();
            // Compared as a whole, because in parts of it, such as those of a single position, everything cancels.
            let expected = packed.pack(["dq", "dk", "dv"].map(|tensor| case.values(tensor)));
            let what = format!("{}.dqkv in {}", case.name, case.dtype);
            close(&what, &case.download(&dqkv), &expected, case.band);
        });
    }
}

fn rope<M: Backend>(golden: &Golden<'_, M>) {
    for (name, seq, heads, head_dim, rotary_dim) in
        [("rope", 7, 3, 6, 6), ("rope_500000", 5, 2, 10, 10), ("rope_partial", 7, 3, 10, 4)]
    {
        let packed = Packed { dims: AttentionDims { batch: 2, seq, heads, kv_heads: 1, head_dim } };
        golden.each(&[name], |case| {
            // Frequencies are in single precision.
            let case = &Case { band: 1e-5, ..*case };
            let factor = if rotary_dim < head_dim { case.scalar("factor") } else { 1.0 };
            let rope = Rope { factor, ..Rope::new(case.scalar("base"), rotary_dim) };
            let zeros = vec![0.0; packed.dims.rows() * head_dim];
            for (from, to, backward) in [("x", "y", false), ("dy", "dx", true)] {
                let mut qkv = case.upload(&packed.pack([case.values(from), &zeros, &zeros]));
                case.memory.rope(packed.dims, &rope, out(&mut qkv), backward).unwrap();
                case.expect_values(to, &packed.part(&case.download(&qkv), 0));
            }
        });
    }
}

fn activations<M: Backend>(golden: &Golden<'_, M>) {
    golden.each(&["swiglu", "swiglu_extreme"], |case| {
        let (gate, up, dy) = (case.input("gate"), case.input("up"), case.input("dy"));
        let [mut y, mut dgate, mut dup] = [(); 3].map(|()| case.allocate(gate.len()));
        let (gate, up) = (all(&gate), all(&up));
        case.memory.swiglu(gate, up, out(&mut y)).unwrap();
        case.memory.swiglu_backward(gate, up, all(&dy), out(&mut dgate), out(&mut dup)).unwrap();
        case.expect("y", &y);
        case.expect("dgate", &dgate);
        case.expect("dup", &dup);
    });
    golden.each(&["gelu_new", "gelu_new_extreme"], |case| {
        let (x, dy) = (case.input("x"), case.input("dy"));
        let [mut y, mut dx] = [(); 2].map(|()| case.allocate(x.len()));
        case.memory.gelu(all(&x), out(&mut y)).unwrap();
        case.memory.gelu_backward(all(&x), all(&dy), out(&mut dx)).unwrap();
        case.expect("y", &y);
        case.expect("dx", &dx);
    });
}

fn linear_maps<M: Backend>(golden: &Golden<'_, M>) {
    for (name, rows, inputs, outputs, orientation) in [
        ("linear", 6, 5, 7, Orientation::OutIn),
        ("linear_no_bias", 4, 6, 3, Orientation::OutIn),
        ("conv1d", 6, 5, 7, Orientation::InOut),
    ] {
        let dims = LinearDims { rows, inputs, outputs, y_stride: outputs, orientation };
        golden.each(&[name], |case| {
            let (x, weight, dy) = (case.input("input"), case.input("weight"), case.input("dy"));
            let bias = (name != "linear_no_bias").then(|| case.input("bias"));
            let (mut y, mut dx, mut dweight) =
                (case.allocate(dy.len()), case.allocate(x.len()), case.allocate(weight.len()));
            let memory = case.memory;
            memory.linear(dims, all(&x), all(&weight), bias.as_ref().map(all), out(&mut y)).unwrap();
            memory.linear_backward_input(dims, all(&dy), all(&weight), out(&mut dx), false).unwrap();
            memory.linear_backward_weight(dims, all(&x), all(&dy), written(&mut dweight)).unwrap();
            case.expect("y", &y);
            case.expect("dinput", &dx);
            case.expect("dweight", &dweight);
            if bias.is_some() {
                let mut dbias = case.allocate(outputs);
                memory.linear_backward_bias(dims, all(&dy), written(&mut dbias)).unwrap();
                case.expect("dbias", &dbias);
            }
        });
    }
}

fn embedding<M: Backend>(golden: &Golden<'_, M>) {
    golden.each(&["embedding"], |case| {
        let (ids, table, dy) = (case.tokens("ids"), case.input("weight"), case.input("dy"));
        let (mut y, mut dtable) = (case.allocate(dy.len()), case.allocate(table.len()));
        case.memory.embedding(4, all(&ids), all(&table), out(&mut y), false).unwrap();
        case.memory.embedding_backward((4, None), all(&ids), all(&dy), written(&mut dtable)).unwrap();
        case.expect("y", &y);
        case.expect("dweight", &dtable);
    });
}

/// The head first multiplies by its weight; with the identity, hidden states are logits.
fn cross_entropy<M: Backend>(golden: &Golden<'_, M>) {
    golden.each(&["cross_entropy", "cross_entropy_ignore", "cross_entropy_sharp"], |case| {
        let (x, targets) = (case.input("logits"), case.tokens("targets"));
        let (rows, vocab) = (targets.len(), 9);
        let identity: Vec<f64> = (0..vocab * vocab).map(|i| f64::from(i % (vocab + 1) == 0)).collect();
        let weight = case.upload(&identity);
        for chunk_rows in [1, 2, rows] {
            let dims = HeadDims::new([rows, vocab, vocab], chunk_rows);
            let mut losses = case.memory.allocate(Category::Workspace, DType::F64, rows).unwrap();
            let (mut logits, mut dx) = (case.allocate(chunk_rows * vocab), case.allocate(x.len()));
            let (x, weight, targets) = (all(&x), all(&weight), all(&targets));
            let (to, scratch) = (out(&mut losses), out(&mut logits));
            case.memory
                .head_loss_backward(dims, x, weight, targets, (to, None), scratch, None, out(&mut dx), None)
                .unwrap();
            let count = case.scalar("count");
            let sum: f64 = case.download(&losses).iter().sum();
            case.expect_values("sum", &[sum]);
            case.expect_values("y", &[sum / count]);
            let gradients: Vec<f64> = case.download(&dx).iter().map(|value| value / count).collect();
            case.expect_values("dlogits", &gradients);
        }
    });
}
