//! Converts random strided, compressed and shared sources to every target and back.

use proptest::prelude::*;

use super::*;
use crate::{
    native::NativeReader,
    random_checkpoint::{RandomCheckpoint, Seeded},
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn random_sources_convert_byte_exact_to_every_target(seed: u64, world_size in 1usize..5) {
        let dir = tempfile::tempdir().unwrap();
        let mut made = RandomCheckpoint::write(&mut Seeded(seed), &dir.path().join("source"));
        // A second name for the same bytes.
        let (name, bytes) = made.bytes.pop_first().unwrap();
        let shared = crate::checkpoint::Tensor {
            path: vec![crate::checkpoint::Key::Name("shared".to_owned())],
            ..made.checkpoint.tensors[&name].clone()
        };
        made.checkpoint.tensors.insert("shared".to_owned(), shared);
        made.bytes.extend([("shared".to_owned(), bytes.clone()), (name, bytes)]);
        let world_size = NonZero::new(world_size).unwrap();
        for target in [Target::Safetensors, Target::Torch, Target::Dcp, Target::Native] {
            let (out, again) = (dir.path().join(format!("{target:?}")), dir.path().join(format!("{target:?}-native")));
            let conversion = Conversion { part: Part::All, world_size, ..Conversion::new(target) };
            let report = converted(&made.checkpoint, &out, &conversion).unwrap();
            let result = formats::open(&out).unwrap();
            converted(&result, &again, &Conversion::new(Target::Native)).unwrap();
            let reader = NativeReader::open(&again).unwrap();
            for (name, bytes) in &made.bytes {
                if report.tied.iter().any(|(copy, _)| copy == name) {
                    continue;
                }
                let (expected, tensor) = (&made.checkpoint.tensors[name], &result.tensors[name]);
                prop_assert_eq!((tensor.dtype, &tensor.shape), (expected.dtype, &expected.shape));
                let mut got = vec![0; bytes.len()];
                reader.read_rows(name, 0..reader.tensor(name).unwrap().row_count(), &mut got).unwrap();
                prop_assert_eq!(&got, bytes, "{} of {:?}", name, target);
            }
        }
    }
}
