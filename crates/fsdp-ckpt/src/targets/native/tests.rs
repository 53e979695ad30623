//! Native targets through a real transfer: any source, any world size, back again, and every flipped byte.

use std::{fs, path::Path, sync::atomic::AtomicBool};

use proptest::prelude::*;

use super::*;
use crate::{
    checkpoint::{Checkpoint, Key, Value},
    formats,
    native::NativeReader,
    random_checkpoint::{RandomCheckpoint, Seeded},
    targets::OutputTensor,
    transfer::{self, NoProgress, Options, OutputKind, Staged},
    verify::verify,
};

static NEVER: AtomicBool = AtomicBool::new(false);

fn options() -> Options<'static> {
    Options { sync: false, ..Options::new(&NoProgress, &NEVER) }
}

/// Selects everything in a checkpoint, unchanged.
fn all_of(checkpoint: &Checkpoint) -> Selection {
    let tensor = |(name, tensor): (&String, &crate::checkpoint::Tensor)| OutputTensor {
        name: name.clone(),
        path: tensor.path.clone(),
        role: tensor.role,
        source: name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        tied_to: None,
    };
    Selection {
        tensors: checkpoint.tensors.iter().map(tensor).collect(),
        values: checkpoint.values.values().cloned().collect(),
    }
}

fn convert(checkpoint: &Checkpoint, dir: &Path, world: usize) -> Checkpoint {
    let staged = Staged::new(dir, OutputKind::Directory).unwrap();
    transfer::run(checkpoint, plan(&all_of(checkpoint), world).unwrap(), staged, &options()).unwrap();
    formats::native::open(dir).unwrap()
}

fn object(name: &str, value: Value) -> (String, Object) {
    (name.to_owned(), Object { path: vec![Key::Name(name.to_owned())], role: Role::Other, value })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn native_conversion_round_trips_at_any_world_size(seed: u64, world in 1usize..6) {
        let dir = tempfile::tempdir().unwrap();
        let mut made = RandomCheckpoint::write(&mut Seeded(seed), &dir.path().join("source"));
        let rng = Value::Tuple(vec![Value::Float(f64::NAN.copysign(-1.0)), Value::Bytes(vec![1, 2])]);
        let state = Value::Dict(vec![(Value::Str("step".into()), Value::Int(7))]);
        made.checkpoint.values = [object("rng", rng), object(RUN_STATE, state.clone())].into();
        let first = convert(&made.checkpoint, &dir.path().join("first"), world);
        let second = convert(&first, &dir.path().join("second"), 7 - world);
        for (checkpoint, world) in [(first, world), (second, 7 - world)] {
            prop_assert_eq!(checkpoint.world_size, Some(world));
            prop_assert_eq!(checkpoint.tensors.len(), made.checkpoint.tensors.len());
            for (name, tensor) in &made.checkpoint.tensors {
                let got = &checkpoint.tensors[name];
                let described = (&got.path, got.role, got.dtype, &got.shape);
                prop_assert_eq!(described, (&tensor.path, tensor.role, tensor.dtype, &tensor.shape));
            }
            let reader = NativeReader::open(&checkpoint.path).unwrap();
            for (name, bytes) in &made.bytes {
                let mut got = vec![0; bytes.len()];
                reader.read_rows(name, 0..reader.tensor(name).unwrap().row_count(), &mut got).unwrap();
                prop_assert_eq!(&got, bytes);
            }
            prop_assert_eq!(&checkpoint.values[RUN_STATE].value, &state);
            prop_assert_eq!(&reader.manifest().run_state["step"], 7);
            // Compare debug text, because a NaN is not equal to itself.
            let values = [&checkpoint.values["rng"], &made.checkpoint.values["rng"]];
            prop_assert_eq!(format!("{:?}", values[0]), format!("{:?}", values[1]));
            let found = verify(&checkpoint, &options()).unwrap();
            prop_assert!(found.is_sound(), "{:?}", found.problems);
            prop_assert_eq!(found.unprotected_bytes(), 0);
        }
    }
}

#[test]
fn non_dict_run_state_stays_a_value() {
    let values = vec![object(RUN_STATE, Value::Int(1)).1];
    let planned = plan(&Selection { tensors: Vec::new(), values }, 1).unwrap();
    let tail = (planned.tail)(&[Vec::new()]).unwrap();
    let manifest = Manifest::parse(tail.files[0].1.clone()).unwrap();
    assert!(manifest.run_state.is_empty());
    assert_eq!(manifest.values[RUN_STATE].value, Value::Int(1));
}

#[test]
fn bit_flip_in_every_native_byte_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = |len: u8| (0..len).map(|byte| byte.wrapping_mul(37)).collect::<Vec<u8>>();
    let tensors = [("a", bytes(12)), ("b", bytes(5))];
    let tensors = tensors.map(|(name, bytes)| (name.to_owned(), (crate::safetensors::TensorType::U8, bytes)));
    let made = RandomCheckpoint::flat(&dir.path().join("source"), &tensors.into());
    let native = dir.path().join("native");
    let whole = convert(&made.checkpoint, &native, 2);
    for source in &whole.sources {
        let content = fs::read(source.path()).unwrap();
        for at in 0..content.len() {
            let mut changed = content.clone();
            changed[at] ^= 1 << (at % 8);
            fs::write(source.path(), &changed).unwrap();
            // Check detection by opening again, and by a checkpoint that was opened before the damage.
            let opened = formats::native::open(&native);
            let found = opened.is_ok_and(|checkpoint| verify(&checkpoint, &options()).unwrap().is_sound());
            assert!(!found, "byte {at} of {}", source.path().display());
            assert!(!verify(&whole, &options()).unwrap().is_sound());
        }
        fs::write(source.path(), &content).unwrap();
    }
    assert!(verify(&whole, &options()).unwrap().is_sound());
}
