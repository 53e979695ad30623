use fsdp_ckpt::safetensors::{Header, TensorSpec, TensorType};

use super::file::IGNORED_LABEL;
use super::*;

/// Writes a file with these tensors of `I64`.
fn file(tensors: &[(&str, [usize; 2], Vec<i64>)]) -> tempfile::NamedTempFile {
    let spec = |(name, shape, _): &(&str, [usize; 2], Vec<i64>)| TensorSpec {
        name: (*name).to_owned(),
        dtype: TensorType::I64,
        shape: shape.to_vec(),
    };
    let (header, mut bytes) = Header::layout(tensors.iter().map(spec).collect(), None).unwrap();
    for entry in header.entries() {
        let (.., values) = tensors.iter().find(|(name, ..)| *name == entry.name()).unwrap();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn read(tensors: &[(&str, [usize; 2], Vec<i64>)], shifted: bool) -> Result<Vec<MicroBatch>, String> {
    let file = file(tensors);
    read_batches(file.path(), shifted, (10, Some(8)))
        .map_err(|error| error.to_string().replace(file.path().to_str().unwrap(), "FILE"))
}

const IGNORED: i64 = IGNORED_LABEL;

#[test]
fn labels_are_shifted_within_rows() {
    let tensors = [
        ("m0.input_ids", [2, 3], vec![1, 2, 3, 4, 5, 6]),
        ("m0.labels", [2, 3], vec![1, 2, 3, IGNORED, 5, 6]),
    ];
    let batch = read(&tensors, false).unwrap().remove(0);
    assert_eq!(batch.targets, [Some(2), Some(3), None, Some(5), Some(6), None]);
    let shifted = read(&tensors, true).unwrap().remove(0);
    assert_eq!(shifted.targets, [Some(1), Some(2), Some(3), None, Some(5), Some(6)]);
}

#[test]
fn every_fault_of_a_file_names_its_tensor() {
    let ids = || ("m0.input_ids", [1, 3], vec![1, 2, 3]);
    let labels = || ("m0.labels", [1, 3], vec![1, 2, 3]);
    let cases = [
        (vec![labels()], "m0.input_ids: it is missing"),
        (vec![ids()], "m0.labels: it is missing"),
        (
            vec![("m0.input_ids", [1, 3], vec![1, 2, 10]), labels()],
            "m0.input_ids: 10 is not among the 10 tokens",
        ),
        (vec![ids(), ("m0.labels", [1, 3], vec![1, -1, 3])], "m0.labels: -1 is not among"),
        (
            vec![ids(), ("m0.labels", [3, 1], vec![1, 2, 3])],
            "m0.labels: its shape is [3, 1], expected [1, 3]",
        ),
        (vec![ids(), ("m0.labels", [1, 3], vec![IGNORED; 3])], "no position of any micro-batch counts"),
        (
            vec![ids(), labels(), ("m1.labels", [1, 3], vec![1, 2, 3])],
            "m1.input_ids: it is missing, although there is a micro-batch m1",
        ),
        (
            vec![ids(), labels(), ("m2.input_ids", [1, 3], vec![1, 2, 3])],
            "m1.input_ids: it is missing, although there is a micro-batch m2",
        ),
        (vec![ids(), labels(), ("m00.labels", [1, 3], vec![1, 2, 3])], "m00.labels: it does not belong here"),
        (vec![ids(), labels(), ("m0.loss", [1, 3], vec![1, 2, 3])], "m0.loss: it does not belong here"),
        (
            vec![("m0.input_ids", [3, 1], vec![1, 2, 3]), ("m0.labels", [3, 1], vec![1, 2, 3])],
            "but for the first of each row",
        ),
        (
            vec![ids(), labels(), ("m0.attention_mask", [1, 3], vec![2, 2, 1])],
            "m0.attention_mask: it has 2, expected 1 for text",
        ),
        (
            vec![ids(), labels(), ("m0.attention_mask", [1, 3], vec![0; 3])],
            "m0.attention_mask: row 0 has labels that count, but no text",
        ),
        (
            vec![ids(), labels(), ("m0.position_ids", [1, 3], vec![0, 2, 3])],
            "row 0, position 1: 2 neither begins",
        ),
        (
            vec![("m0.input_ids", [1, 9], vec![1; 9]), ("m0.labels", [1, 9], vec![1; 9])],
            "m0.input_ids: its rows have 9 tokens, more than the 8 positions of the model",
        ),
    ];
    for (tensors, part) in cases {
        let message = read(&tensors, false).unwrap_err();
        assert!(message.contains(part) && message.contains("FILE"), "{message}");
    }
}

#[test]
fn labels_of_the_other_convention_are_refused() {
    let with = |labels: Vec<i64>, shifted| {
        read(
            &[("m0.input_ids", [1, 8], vec![1, 2, 3, 4, 5, 6, 7, 8]), ("m0.labels", [1, 8], labels)],
            shifted,
        )
    };
    let (same, next) = (vec![1, 2, 3, 4, 5, 6, 7, 8], vec![2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(with(same.clone(), false).is_ok() && with(next.clone(), true).is_ok());
    assert!(with(same, true).unwrap_err().contains("leave out --shifted"));
    assert!(with(next.clone(), false).unwrap_err().contains("pass --shifted"));
    // One label that does not fit, or too few of them: neither convention is certain.
    assert!(with([&next[..3], &[1], &next[4..]].concat(), false).is_ok());
    assert!(with([&[IGNORED; 4], &next[4..]].concat(), false).is_ok());
}

#[test]
fn dtypes_that_cannot_be_tokens_are_refused() {
    let with = |dtype: TensorType, part: &str| {
        let ids = [1i64; 3].iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        let data = |name: &str| match name.ends_with(part) {
            true => (dtype, vec![1; 3 * dtype.size_bytes()]),
            false => (TensorType::I64, ids.clone()),
        };
        let names = ["m0.input_ids", "m0.labels", "m0.attention_mask"];
        let specs =
            names.map(|name| TensorSpec { name: name.to_owned(), dtype: data(name).0, shape: vec![1, 3] });
        let (header, mut bytes) = Header::layout(specs.to_vec(), None).unwrap();
        header.entries().iter().for_each(|entry| bytes.extend(data(entry.name()).1));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read_batches(file.path(), false, (1 << 25, None)).map_err(|error| error.to_string())
    };
    for dtype in [TensorType::U8, TensorType::I32] {
        assert!(with(dtype, "input_ids").is_ok(), "{}", dtype.name());
    }
    for dtype in [TensorType::Bool, TensorType::F32, TensorType::Bf16] {
        let message = with(dtype, "input_ids").unwrap_err();
        assert!(
            message.contains(&format!("its dtype is {}, expected I64, I32 or U8", dtype.name())),
            "{message}"
        );
    }
    assert!(with(TensorType::Bool, "attention_mask").is_ok());
    assert!(with(TensorType::F32, "attention_mask").unwrap_err().ends_with("expected I64, I32, U8 or BOOL"));
}

#[test]
fn positions_that_restart_are_documents() {
    let tensors = |positions: Vec<i64>| {
        [
            ("m0.input_ids", [1, 4], vec![1, 2, 3, 4]),
            ("m0.labels", [1, 4], vec![1, 2, 3, 4]),
            ("m0.position_ids", [1, 4], positions),
        ]
    };
    assert_eq!(read(&tensors(vec![0, 1, 2, 3]), false).unwrap()[0].positions, None);
    let packed = read(&tensors(vec![0, 1, 0, 1]), false).unwrap().remove(0);
    let (batch, facts) = packed.to_batch(Documents::Given, false);
    assert_eq!((batch.positions, facts.documents), (Some(vec![0, 1, 0, 1]), None));
    let (batch, facts) = packed.to_batch(Documents::Joined, false);
    assert_eq!(batch.positions, Some(vec![0, 1, 0, 1]));
    assert_eq!(facts.documents, Some(std::iter::once(0..4).collect()));
    let (batch, facts) = packed.to_batch(Documents::RunOn, false);
    assert_eq!((batch.positions, facts.documents), (Some(vec![0, 1, 2, 3]), Some(vec![0..2, 2..4])));
    assert_eq!(packed.to_batch(Documents::Ignored, false).0.positions, None);
    let (batch, _) = packed.to_batch(Documents::Restarting(4), false);
    assert_eq!(batch.positions, Some(vec![0, 0, 0, 0]));
}

#[test]
fn padding_in_front_is_a_document_of_its_own() {
    let tensors = [
        ("m0.input_ids", [1, 4], vec![0, 0, 3, 4]),
        ("m0.labels", [1, 4], vec![IGNORED, IGNORED, IGNORED, 4]),
        ("m0.attention_mask", [1, 4], vec![0, 0, 1, 1]),
        // What transformers gives such rows; without them, positions run on.
        ("m0.position_ids", [1, 4], vec![1, 1, 0, 1]),
    ];
    let given = read(&tensors, false).unwrap().remove(0);
    assert_eq!((given.positions, given.runs_on), (Some(vec![0, 1, 0, 1]), false));
    let without = read(&tensors[..3], false).unwrap().remove(0);
    assert_eq!((without.positions.as_deref(), without.runs_on), (Some(&[0, 1, 0, 1][..]), true));
    assert_eq!(without.to_batch(Documents::Given, false).0.positions, Some(vec![0, 1, 2, 3]));
    let counted =
        [tensors[0].clone(), ("m0.labels", [1, 4], vec![IGNORED, IGNORED, 3, 4]), tensors[2].clone()];
    assert!(read(&counted, false).unwrap_err().contains("the padding in front of it would predict it"));
    let holes = [tensors[0].clone(), tensors[1].clone(), ("m0.attention_mask", [1, 4], vec![1, 0, 1, 1])];
    assert!(read(&holes, false).unwrap_err().contains("row 0 has padding between text"));
}

#[test]
fn labels_of_faults_count_what_they_say() {
    let tensors = [
        ("m0.input_ids", [1, 6], vec![1, 2, 3, 4, 0, 0]),
        ("m0.labels", [1, 6], vec![IGNORED, IGNORED, 3, 4, IGNORED, IGNORED]),
        ("m0.attention_mask", [1, 6], vec![1, 1, 1, 1, 0, 0]),
    ];
    let batch = read(&tensors, false).unwrap().remove(0);
    let targets = |labels| batch.labelled(labels).targets;
    assert_eq!(batch.targets, [None, Some(3), Some(4), None, None, None]);
    assert_eq!(targets(Labels::WithPrompts), [Some(2), Some(3), Some(4), None, None, None]);
    assert_eq!(targets(Labels::WithPadding), [None, Some(3), Some(4), Some(0), Some(0), None]);
    assert_eq!(targets(Labels::All), [Some(2), Some(3), Some(4), Some(0), Some(0), None]);
    assert_eq!(targets(Labels::ShiftedTwice), [Some(3), Some(4), None, None, None, None]);
    assert_eq!(targets(Labels::NotShifted), [None, None, Some(3), Some(4), None, None]);
    let (_, facts) = batch.to_batch(Documents::Given, true);
    assert_eq!((facts.keys_ends, facts.lengths), (vec![4], Some(vec![4])));
}
