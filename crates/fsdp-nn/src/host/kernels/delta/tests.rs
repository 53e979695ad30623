use super::spans;
use crate::Backend;
use crate::backend::{BatchFacts, Operands, Write};
use crate::conformance::kit::{Kit, numbers};
use crate::host::HostMemory;
use crate::op::{ConvolutionDims, Delta, DeltaDims, NORM_EPS, Op};
use fsdp_core::DType;
use fsdp_core::memory::SliceMut;

const DIMS: DeltaDims =
    DeltaDims { batch: 1, seq: 150, key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 5, packed: true };

fn inputs() -> [Vec<f64>; 4] {
    let lens =
        [DIMS.rows() * DIMS.width(), 2 * DIMS.rows() * DIMS.value_heads, DIMS.value_heads, DIMS.value_heads];
    [0, 1, 2, 3].map(|i| numbers(i as u64, lens[i]))
}

fn scan(
    kit: &Kit<HostMemory>,
    dims: DeltaDims,
    inputs: &[Vec<f64>; 4],
    documents: &[std::ops::Range<usize>],
) -> Vec<f64> {
    let inputs = inputs.each_ref().map(|values| kit.put(values));
    let mut y = kit.result(dims.rows() * dims.value_heads * dims.value_dim);
    let reads = inputs.each_ref().map(|input| input.read());
    let batch = BatchFacts { documents, ..BatchFacts::default() };
    let operands = Operands { reads: &reads, writes: &mut [Write::over(y.write())], batch };
    kit.memory.run(&Op::Delta(Delta::Scan(dims)), operands).unwrap();
    kit.get(&y)
}

/// The gradients of rows and of gates, for that of the output.
fn gradients(
    kit: &Kit<HostMemory>,
    dims: DeltaDims,
    inputs: [&[f64]; 5],
    documents: &[std::ops::Range<usize>],
) -> [Vec<f64>; 2] {
    let inputs = inputs.map(|values| kit.put(values));
    let lens = [dims.rows() * dims.width(), 2 * dims.rows() * dims.value_heads];
    let (mut results, mut states) =
        (lens.map(|len| kit.result(len)), kit.statistics(dims.states().iter().product()));
    let [rows, gates] = results.each_mut().map(|result| Write::over(result.write()));
    let reads = inputs.each_ref().map(|input| input.read());
    let batch = BatchFacts { documents, ..BatchFacts::default() };
    let writes = &mut [rows, gates, Write::over(states.write())];
    let op = Delta::ScanBackward { dims, weight: false };
    kit.memory.run(&Op::Delta(op), Operands { reads: &reads, writes, batch }).unwrap();
    results.each_ref().map(|result| kit.get(result))
}

/// The rule token by token, as its definition says.
fn recurrence(
    [qkv, gates, a_log, dt_bias]: &[Vec<f64>; 4],
    rows: std::ops::Range<usize>,
    head: usize,
) -> Vec<f64> {
    let DeltaDims { key_heads, value_heads, key_dim, value_dim, .. } = DIMS;
    let mut state = vec![vec![0.0; value_dim]; key_dim];
    let mut outputs = Vec::new();
    for row in rows {
        let (packed, key_head) = (&qkv[row * DIMS.width()..], head / DIMS.group());
        let normed = |column: usize| -> Vec<f64> {
            let part = &packed[column..column + key_dim];
            let norm = (part.iter().map(|x| x * x).sum::<f64>() + NORM_EPS).sqrt();
            part.iter().map(|x| x / norm).collect()
        };
        let (q, k) = (normed(key_head * key_dim), normed((key_heads + key_head) * key_dim));
        let value = &packed[2 * key_heads * key_dim + head * value_dim..][..value_dim];
        let gates = &gates[row * 2 * value_heads..];
        let beta = 1.0 / (1.0 + (-gates[head]).exp());
        let decay = (-a_log[head].exp() * (gates[value_heads + head] + dt_bias[head]).exp().ln_1p()).exp();
        for column in 0..value_dim {
            let read: f64 = (0..key_dim).map(|i| decay * state[i][column] * k[i]).sum();
            for i in 0..key_dim {
                state[i][column] = decay * state[i][column] + k[i] * beta * (value[column] - read);
            }
            outputs
                .push((0..key_dim).map(|i| state[i][column] * q[i]).sum::<f64>() / (key_dim as f64).sqrt());
        }
    }
    outputs
}

/// Decays of `exp(-16)` per token leave nothing of the first tokens of a chunk.
#[test]
fn chunks_equal_the_recurrence_over_documents() {
    let (mut inputs, documents) = (inputs(), [0..70, 70..71, 71..150]);
    for rate in [0.0, 3.0] {
        inputs[2].iter_mut().for_each(|a_log| *a_log += rate);
        let got = scan(&Kit::host(DType::F64), DIMS, &inputs, &documents);
        for (rows, head) in
            documents.iter().flat_map(|rows| (0..DIMS.value_heads).map(move |head| (rows, head)))
        {
            let expected = recurrence(&inputs, rows.clone(), head);
            for (at, expected) in expected.iter().enumerate() {
                let (row, column) = (rows.start + at / DIMS.value_dim, at % DIMS.value_dim);
                let got = got[(row * DIMS.value_heads + head) * DIMS.value_dim + column];
                assert!(
                    (got - expected).abs() < 1e-12 * (1.0 + expected.abs()),
                    "{got} for {expected} in {row}"
                );
            }
        }
    }
}

#[test]
fn document_has_the_bits_it_has_alone() {
    let (inputs, rows) = (inputs(), 7..140);
    let documents = [0..rows.start, rows.clone(), rows.end..150];
    let [qkv, gates, a_log, dt_bias] = &inputs;
    let cut = |all: &[f64], width: usize| all[rows.start * width..rows.end * width].to_vec();
    let alone = [cut(qkv, DIMS.width()), cut(gates, 2 * DIMS.value_heads), a_log.clone(), dt_bias.clone()];
    let dims = DeltaDims { seq: rows.len(), packed: false, ..DIMS };
    for dtype in [DType::F32, DType::Bf16] {
        let kit = Kit::host(dtype);
        let packed = scan(&kit, DIMS, &inputs, &documents);
        let width = DIMS.value_heads * DIMS.value_dim;
        assert_eq!(cut(&packed, width), scan(&kit, dims, &alone, &[]), "{dtype}");
        let dy = numbers(4, DIMS.rows() * width);
        let packed = gradients(&kit, DIMS, [qkv, gates, a_log, dt_bias, &dy], &documents);
        let [qkv, gates, a_log, dt_bias] = alone.each_ref().map(|values| &values[..]);
        let alone = gradients(&kit, dims, [qkv, gates, a_log, dt_bias, &cut(&dy, width)], &[]);
        let widths = [DIMS.width(), 2 * DIMS.value_heads];
        assert_eq!([0, 1].map(|i| cut(&packed[i], widths[i])), alone, "{dtype}");
    }
}

#[test]
fn text_in_parts_continues_state_and_rows() {
    let kit = Kit::host(DType::F64);
    let (inputs, width) = (inputs(), DIMS.value_heads * DIMS.value_dim);
    let whole = scan(&kit, DIMS, &inputs, std::slice::from_ref(&(0..DIMS.seq)));
    let mut states = kit.put(&vec![0.0; DIMS.value_heads * DIMS.key_dim * DIMS.value_dim]);
    for rows in [0..90, 90..91, 91..150] {
        let dims = DeltaDims { seq: rows.len(), ..DIMS };
        let [qkv, gates] = [0, 1].map(|i| {
            let width = [DIMS.width(), 2 * DIMS.value_heads][i];
            kit.put(&inputs[i][rows.start * width..rows.end * width])
        });
        let ([a_log, dt_bias], mut y) = ([2, 3].map(|i| kit.put(&inputs[i])), kit.result(rows.len() * width));
        let reads = [qkv.read(), gates.read(), a_log.read(), dt_bias.read()];
        kit.memory.scan_cached(dims, reads, [states.write(), y.write()]).unwrap();
        for (got, expected) in kit.get(&y).iter().zip(&whole[rows.start * width..]) {
            assert!((got - expected).abs() < 1e-12 * (1.0 + expected.abs()), "{got} for {expected}");
        }
    }
}

#[test]
fn convolution_in_parts_has_the_bits_of_the_whole() {
    let kit = Kit::host(DType::F32);
    let dims = ConvolutionDims { batch: 1, seq: 20, width: 7, kernel: 4, packed: false };
    let (x, weight) = (numbers(1, 140), kit.put(&numbers(2, 28)));
    let run = |rows: std::ops::Range<usize>, before: Option<SliceMut<'_, crate::HostBuffer>>| {
        let dims = ConvolutionDims { seq: rows.len(), ..dims };
        let (x, mut y) = (kit.put(&x[rows.start * 7..rows.end * 7]), kit.result(rows.len() * 7));
        let reads = [x.read(), weight.read()];
        match before {
            Some(before) => kit.memory.convolve_cached(dims, reads, [before, y.write()]).unwrap(),
            None => {
                let writes = &mut [Write::over(y.write())];
                let operands = Operands { reads: &reads, writes, batch: BatchFacts::default() };
                kit.memory.run(&Op::Delta(Delta::Convolve(dims)), operands).unwrap();
            }
        }
        kit.get(&y)
    };
    let mut before = kit.put(&[0.0; 21]);
    let parts = [0..9, 9..10, 10..20].map(|rows| run(rows, Some(before.write())));
    assert_eq!(parts.concat(), run(0..20, None));
}

#[test]
fn samples_are_spans_unless_they_pack_documents() {
    let documents = [0..3, 3..8];
    let batch = BatchFacts { documents: &documents, ..BatchFacts::default() };
    assert_eq!(spans(8, 4, true, batch), documents);
    assert_eq!(spans(8, 4, false, batch), [0..4, 4..8]);
}
