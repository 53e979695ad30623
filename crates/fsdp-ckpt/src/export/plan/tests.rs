//! Shards are cut and named as by Hugging Face.

use super::*;
use crate::safetensors::TensorType;

fn spec(name: &str, dtype: TensorType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_owned() }
}

#[test]
fn shards_are_cut_like_hugging_face() {
    assert_eq!(cut(&[], 10), Vec::<Vec<usize>>::new());
    assert_eq!(cut(&[4, 6, 1], 10), [vec![0, 1], vec![2]]);
    // A tensor above the limit comes first and does not close the current shard.
    assert_eq!(cut(&[3, 11, 3, 9], 10), [vec![1], vec![0, 2], vec![3]]);
    assert_eq!(cut(&[0, 0, 10, 0], 10), [vec![0, 1, 2, 3]]);
    assert_eq!(cut(&[1, 2], 0), [vec![0], vec![1]]);
}

#[test]
fn single_shard_has_no_index() {
    let plan =
        ExportPlan::sharded("out", vec![spec("a", TensorType::F32, &[2])], Metadata::new(), 8).unwrap();
    assert_eq!(plan.path(), Path::new("out/model.safetensors"));
    assert!(plan.index().is_none());
    let empty = ExportPlan::sharded("out", Vec::new(), Metadata::new(), 8).unwrap();
    assert_eq!(empty.path(), Path::new("out/model.safetensors"));
}

#[test]
fn tensors_are_sorted_by_element_width_for_alignment() {
    let tensors = vec![
        spec("byte", TensorType::U8, &[3]),
        spec("half", TensorType::Bf16, &[5]),
        spec("double", TensorType::F64, &[1]),
        spec("other_half", TensorType::F16, &[1]),
        spec("single", TensorType::F32, &[3]),
    ];
    let plan = ExportPlan::new("x", tensors, Metadata::new()).unwrap();
    let header = plan.files()[0].header();
    let names: Vec<&str> = header.entries().iter().map(TensorEntry::name).collect();
    assert_eq!(names, ["double", "single", "half", "other_half", "byte"]);
    for entry in header.entries() {
        let start = header.data_start() + entry.data_range().start;
        assert_eq!(start % entry.dtype().size_bytes() as u64, 0, "{}", entry.name());
    }
}

#[test]
fn order_of_tensors_does_not_depend_on_given_order() {
    let names = ["layers.10.bias", "layers.2.bias", "embed", "layers.2.a", "b"];
    let spec = |name| spec(name, if name == "b" { TensorType::F32 } else { TensorType::Bf16 }, &[2]);
    let plan = |names: &[&'static str]| {
        ExportPlan::new("x", names.iter().copied().map(spec).collect(), Metadata::new()).unwrap()
    };
    let entries = plan(&names);
    let got: Vec<&str> = entries.files()[0].header().entries().iter().map(TensorEntry::name).collect();
    assert_eq!(got, ["b", "embed", "layers.10.bias", "layers.2.a", "layers.2.bias"]);
    for at in 0..names.len() {
        let mut other = names;
        other.rotate_left(at);
        assert_eq!(plan(&other), entries);
    }
}

#[test]
fn metadata_format_defaults_to_pt() {
    let plan = ExportPlan::new("x", Vec::new(), Metadata::new()).unwrap();
    assert_eq!(plan.files()[0].header().metadata().unwrap()["format"], "pt");
    let metadata = Metadata::from([("format".to_owned(), "np".to_owned())]);
    let plan = ExportPlan::new("x", Vec::new(), metadata).unwrap();
    assert_eq!(plan.files()[0].header().metadata().unwrap()["format"], "np");
}

#[test]
fn rejects_path_without_file_name() {
    for path in ["/", "..", ""] {
        let error = ExportPlan::new(path, Vec::new(), Metadata::new()).unwrap_err();
        assert!(matches!(error, Error::WrongPath { .. }), "{path}: {error}");
    }
}

#[test]
fn rejects_duplicate_names_across_shards() {
    let tensors = vec![spec("a", TensorType::U8, &[9]), spec("a", TensorType::U8, &[9])];
    let error = ExportPlan::sharded("out", tensors, Metadata::new(), 10).unwrap_err();
    let expected = "out/model.safetensors: it cannot be laid out: its header lists `a` twice";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn export_plan_is_send_and_sync() {
    fn check<T: Clone + Send + Sync + 'static>() {}
    check::<ExportPlan>();
}
