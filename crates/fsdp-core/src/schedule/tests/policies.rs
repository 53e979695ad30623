//! Tests that policies are resolved for a mesh, or rejected.

use crate::mesh::{Axis, Mesh};
use crate::schedule::{Policy, Reshard};

#[test]
fn group_sizes_are_resolved_or_rejected() {
    let resolve = |n, shards| {
        let policy = Policy { reshard_after_forward: Reshard::ToGroup(n), ..Policy::default() };
        policy
            .resolve(Mesh::new([(Axis::Replicate, 2), (Axis::Shard, shards)]).unwrap())
            .map(|policy| policy.reshard_after_forward)
    };
    assert_eq!(resolve(2, 8).unwrap(), Reshard::ToGroup(2));
    assert_eq!(resolve(8, 8).unwrap(), Reshard::Always);
    assert_eq!(resolve(1, 8).unwrap(), Reshard::Never);
    assert_eq!(resolve(1, 1).unwrap(), Reshard::Always);
    for n in [0, 3, 16] {
        let error = resolve(n, 8).unwrap_err().to_string();
        assert!(error.starts_with(&format!("reshard_after_forward = {n}:")), "{error}");
    }
}

#[test]
fn incompatible_dtypes_are_rejected() {
    use crate::DType::{Bf16, F16, F32, F64, I64, U32};
    for param in [F32, F64, Bf16, F16, U32, I64] {
        for reduce in [F32, F64, Bf16, F16, U32, I64] {
            let policy = Policy { param_dtype: param, reduce_dtype: reduce, ..Policy::default() };
            let resolved = policy.resolve(Mesh::new([]).unwrap());
            let fits = matches!((param, reduce), (F64, F64) | (F32 | Bf16 | F16, F32 | Bf16 | F64));
            assert_eq!(resolved.is_ok(), fits, "{param} and {reduce}");
            let Err(crate::Error::Policy { key, value, .. }) = resolved else { continue };
            let culprit = if param.is_float() { ("reduce_dtype", reduce) } else { ("param_dtype", param) };
            assert_eq!((key, value), (culprit.0, culprit.1.to_string()));
        }
    }
}
