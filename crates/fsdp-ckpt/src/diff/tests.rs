//! Compares random checkpoints with copies in which single elements were changed.

use std::{path::Path, sync::atomic::AtomicBool};

use proptest::prelude::*;

use super::*;
use crate::{
    random_checkpoint::{RandomCheckpoint, Seeded},
    transfer::NoProgress,
};

fn compared(a: &Checkpoint, b: &Checkpoint, tolerance: Tolerance) -> Diff {
    let cancel = AtomicBool::new(false);
    let options = Options { window_bytes: 3000, ..Options::new(&NoProgress, &cancel) };
    diff(a, b, tolerance, &options).unwrap()
}

fn of(dir: &Path, tensors: &[(&str, TensorType, &[f64])]) -> RandomCheckpoint {
    let tensor = |(name, dtype, values): &(&str, TensorType, &[f64])| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut out = vec![0; values.len() * dtype.size_bytes()];
        floats::between(TensorType::F64, *dtype, &bytes, &mut out).unwrap();
        ((*name).to_owned(), (*dtype, out))
    };
    RandomCheckpoint::flat(dir, &tensors.iter().map(tensor).collect())
}

fn outcome(a: (TensorType, &[f64]), b: (TensorType, &[f64]), tolerance: Tolerance) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let a = of(&dir.path().join("a"), &[("w", a.0, a.1)]);
    let b = of(&dir.path().join("b"), &[("w", b.0, b.1)]);
    compared(&a.checkpoint, &b.checkpoint, tolerance).tensors.remove("w").unwrap()
}

const EXACT: Tolerance = Tolerance { atol: 0.0, rtol: 0.0 };

proptest! {
    #[test]
    fn same_bytes_in_another_layout_are_equal(seed in any::<u64>()) {
        let dir = tempfile::tempdir().unwrap();
        let made = RandomCheckpoint::write(&mut Seeded(seed), &dir.path().join("a"));
        let flat = made.checkpoint.tensors.iter().map(|(name, tensor)| {
            (name.clone(), (tensor.dtype, made.bytes[name].clone()))
        });
        let mut other = RandomCheckpoint::flat(&dir.path().join("b"), &flat.collect());
        for (name, tensor) in &mut other.checkpoint.tensors {
            tensor.shape = made.checkpoint.tensors[name].shape.clone();
        }
        let diff = compared(&made.checkpoint, &other.checkpoint, EXACT);
        prop_assert!(diff.tensors.values().all(|outcome| *outcome == Outcome::EqualBits), "{:?}", diff);
    }
}

#[test]
fn largest_difference_and_its_index_are_reported() {
    let mut values = vec![1.0; 2000];
    let base = values.clone();
    (values[3], values[1234], values[1999]) = (1.5, -4.0, 2.0);
    let both = |tolerance| outcome((TensorType::F32, &values), (TensorType::F32, &base), tolerance);
    let Outcome::Differs(deviation) = both(EXACT) else { panic!("values differ") };
    assert_eq!(
        (deviation.differing, deviation.beyond_tolerance, deviation.largest, deviation.at),
        (3, 3, 5.0, 1234)
    );
    assert_eq!(deviation.values, [-4.0, 1.0]);
    assert!(
        matches!(both(Tolerance { atol: 4.9, rtol: 0.0 }), Outcome::Differs(d) if d.beyond_tolerance == 1)
    );
    assert!(matches!(both(Tolerance { atol: 2.0, rtol: 3.0 }), Outcome::WithinTolerance(_)));
}

#[test]
fn different_dtypes_are_compared_by_value() {
    let (wide, half) = (TensorType::F32, TensorType::Bf16);
    let dtypes = [wide, half];
    assert_eq!(outcome((wide, &[1.5, -2.0]), (half, &[1.5, -2.0]), EXACT), Outcome::EqualValues { dtypes });
    let Outcome::Differs(found) = outcome((wide, &[1.5, 1.001]), (half, &[1.5, 1.0]), EXACT) else {
        panic!("a value differs")
    };
    assert!((found.largest - 0.001).abs() < 1e-6 && found.at == 1);
}

#[test]
fn special_values_are_compared_without_tolerance() {
    let f32 = TensorType::F32;
    let one = |a: f64, b: f64| outcome((f32, &[a]), (f32, &[b]), Tolerance { atol: 1e30, rtol: 1.0 });
    assert_eq!(one(f64::NAN, f64::NAN), Outcome::EqualBits);
    assert_eq!(one(0.0, -0.0), Outcome::EqualValues { dtypes: [f32, f32] });
    assert_eq!(one(f64::INFINITY, f64::INFINITY), Outcome::EqualBits);
    for (a, b) in [(f64::NAN, 1.0), (1.0, f64::INFINITY), (f64::INFINITY, f64::NEG_INFINITY)] {
        assert!(matches!(one(a, b), Outcome::Differs(found) if found.largest == f64::INFINITY));
    }
}

#[test]
fn missing_tensors_shapes_and_dtypes_are_differences() {
    let dir = tempfile::tempdir().unwrap();
    let (f32, f64) = (TensorType::F32, TensorType::F64);
    let a =
        of(&dir.path().join("a"), &[("left", f32, &[1.0]), ("shape", f32, &[1.0]), ("type", f64, &[1.0])]);
    let mut b = of(
        &dir.path().join("b"),
        &[("right", f32, &[1.0]), ("shape", f32, &[1.0, 2.0]), ("type", f64, &[1.0])],
    );
    b.checkpoint.tensors.get_mut("type").unwrap().dtype = TensorType::I64;
    let diff = compared(&a.checkpoint, &b.checkpoint, EXACT);
    assert!(!diff.is_equal());
    assert_eq!(diff.tensors["left"], Outcome::OnlyInFirst);
    assert_eq!(diff.tensors["right"], Outcome::OnlyInSecond);
    assert_eq!(diff.tensors["shape"], Outcome::ShapesDiffer { shapes: [vec![1], vec![2]] });
    assert_eq!(diff.tensors["type"], Outcome::TypesDiffer { dtypes: [f64, TensorType::I64] });
}

#[test]
fn diff_of_two_empty_checkpoints_is_error() {
    let (none, cancel) = (Checkpoint::default(), AtomicBool::new(false));
    let error = diff(&none, &none, EXACT, &Options::new(&NoProgress, &cancel)).unwrap_err();
    assert!(error.to_string().contains("has tensors to compare"), "{error}");
}

#[test]
fn differing_integers_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, bytes: Vec<u8>| {
        let tensors = [("w".to_owned(), (TensorType::I16, bytes))];
        RandomCheckpoint::flat(&dir.path().join(name), &tensors.into())
    };
    let (a, b) =
        (of("a", vec![0; 4000]), of("b", (0..4000).map(|n| u8::from(n == 1001 || n == 3001)).collect()));
    let diff = compared(&a.checkpoint, &b.checkpoint, EXACT);
    assert_eq!(diff.tensors["w"], Outcome::BitsDiffer { differing: 2, at: 500 });
}
