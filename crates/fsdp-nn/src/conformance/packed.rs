//! Checks of weights in 4 bits: they are decoded to the elements that their format defines, rounded once, and products of
//! experts have the bits that they have with the decoded weights.

use fsdp_core::DType;

use super::Subject;
use super::calls::Calls as _;
use super::kit::{Kit, Operand, numbers};
use crate::backend::{Backend, BatchFacts, Operands, Orientation, Write};
use crate::op::{ExpertDims, Experts, Op, Routing};
use crate::quantized::{Format, Packed, Scales};

const FORMATS: [Format; 3] = [Format::Nf4, Format::Nf4Single, Format::Mxfp4];
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

/// The bytes of a matrix of normally distributed numbers, and its decoded elements.
fn packed(matrix: Packed, key: u64) -> (Vec<f64>, Vec<f64>) {
    let values: Vec<f32> =
        numbers(key, matrix.rows * matrix.columns).into_iter().map(|value| value as f32).collect();
    let scales = Scales::new(matrix.format, matrix.format.magnitudes(&values).collect());
    let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; values.len()]);
    for (row, values) in values.chunks(matrix.columns).enumerate() {
        let start = bytes.len();
        matrix.encode(&scales, row, values, &mut bytes);
        matrix.decode(row, &bytes[start..], &mut decoded[row * matrix.columns..][..matrix.columns]);
    }
    (bytes.into_iter().map(f64::from).collect(), decoded.into_iter().map(f64::from).collect())
}

/// Checks operations on weights in 4 bits.
///
/// # Panics
/// If they differ.
pub fn packed_weights_are_exact<M: Backend>(subject: &Subject<'_, M>) {
    for dtype in DTYPES {
        for format in FORMATS {
            // One row; one block; blocks of scales that begin inside rows.
            for (rows, columns) in [(1, 320), (3, 64), (131, 192), (5, 16_448)] {
                check_decoded(&Kit::new((subject.memory)(), dtype), Packed { rows, columns, format });
            }
            check_products(&Kit { shift: 8, ..Kit::new((subject.memory)(), dtype) }, format);
        }
    }
}

fn check_decoded<M: Backend>(kit: &Kit<M>, matrix: Packed) {
    let (bytes, expected) = packed(matrix, 3);
    let bytes = kit.put_as(DType::U8, &bytes);
    let mut weight = kit.result(matrix.rows * matrix.columns);
    kit.memory.call(Op::Dequantize(matrix), &[bytes.read()], [weight.write()]).unwrap();
    // Putting the elements rounds them once.
    assert_eq!(kit.get(&weight), kit.get(&kit.put(&expected)), "{matrix:?} in {}", kit.dtype);
}

fn check_products<M: Backend>(kit: &Kit<M>, format: Format) {
    let (routing, [inputs, outputs]) = (Routing::whole(9, 4, 2), [128, 24]);
    let dims = ExpertDims { inputs, outputs, orientation: Orientation::OutIn, format: Some(format) };
    let matrix = dims.packed().unwrap();
    // One expert has no rows.
    let ids = [0, 2, 2, 0, 3, 2, 0, 3, 2, 3, 3, 2, 0, 2, 2, 3, 3, 0];
    let routes = kit.ids(&ids);
    let (packed, decoded): (Vec<_>, Vec<_>) = (0..4).map(|expert| packed(matrix, 20 + expert)).unzip();
    for (op, from, to) in [
        (Experts::Product { routing, dims }, inputs, outputs),
        (Experts::ProductBackwardInput { routing, dims }, outputs, inputs),
    ] {
        let x = kit.put(&numbers(7, routing.slots() * from));
        let run = |op: Experts, weights: Vec<Operand<M::Buffer>>| {
            let (mut y, mut scratch) = (kit.result(routing.slots() * to), kit.result(inputs * outputs));
            let reads: Vec<_> = [&x, &routes].into_iter().chain(&weights).map(Operand::read).collect();
            let mut writes = vec![Write::over(y.write()), Write::over(scratch.write())];
            writes.truncate(Op::Experts(op).describe().writes.len());
            let batch = BatchFacts::default();
            kit.memory.run(&Op::Experts(op), Operands { reads: &reads, writes: &mut writes, batch }).unwrap();
            kit.get(&y)
        };
        let plain = ExpertDims { format: None, ..dims };
        let of_floats = match op {
            Experts::Product { .. } => Experts::Product { routing, dims: plain },
            _ => Experts::ProductBackwardInput { routing, dims: plain },
        };
        let expected = run(of_floats, decoded.iter().map(|weight| kit.put(weight)).collect());
        let found = run(op, packed.iter().map(|bytes| kit.put_as(DType::U8, bytes)).collect());
        assert_eq!(found, expected, "{format:?} in {}", kit.dtype);
        assert!(found.iter().all(|value| value.is_finite()) && found.iter().any(|value| *value != 0.0));
    }
}
