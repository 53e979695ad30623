//! Every way an export can fail. A failed export leaves no file under a final name and no temporary file.

use std::{fs, os::unix::fs::symlink, path::Path};

use fsdp_ckpt::{
    Error, FileAction,
    export::{ExportPlan, Receipt},
    safetensors::{Metadata, SafetensorsReader, TensorType},
};

use crate::{names_in, spec};

/// A plan of one file with a 4 x 2 `F32` tensor `w`.
fn single(dir: &Path) -> ExportPlan {
    let tensors = vec![spec("w", TensorType::F32, &[4, 2])];
    ExportPlan::new(dir.join("model.safetensors"), tensors, Metadata::new()).unwrap()
}

/// A plan of two files, each with one 4 x 2 tensor, and an index.
fn sharded(dir: &Path) -> ExportPlan {
    let tensors = vec![spec("v", TensorType::F32, &[4, 2]), spec("w", TensorType::F32, &[4, 2])];
    ExportPlan::sharded(dir, tensors, Metadata::new(), 32).unwrap()
}

fn write_all(plan: &ExportPlan, value: f64) -> Receipt {
    let mut writer = plan.writer();
    for file in plan.files() {
        for entry in file.header().entries() {
            writer.write_rows_f64(entry.name(), 0, &[value; 8]).unwrap();
        }
    }
    writer.finish().unwrap()
}

#[test]
fn final_names_appear_only_on_commit() {
    let dir = tempfile::tempdir().unwrap();
    let plan = sharded(dir.path());
    let export = plan.create().unwrap();
    let receipt = write_all(&plan, 1.0);
    assert!(names_in(dir.path()).iter().all(|name| name.ends_with(".tmp")));
    export.commit([receipt]).unwrap();
    let expected = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(names_in(dir.path()), expected);
}

#[test]
fn dropped_or_aborted_export_removes_its_files() {
    let dir = tempfile::tempdir().unwrap();
    for plan in [single(dir.path()), sharded(dir.path())] {
        let export = plan.create().unwrap();
        let _receipt = write_all(&plan, 1.0);
        drop(export);
        assert_eq!(names_in(dir.path()), [""; 0]);
        plan.create().unwrap().abort().unwrap();
        assert_eq!(names_in(dir.path()), [""; 0]);
    }
}

#[test]
fn leave_keeps_temporary_files_for_next_export() {
    let dir = tempfile::tempdir().unwrap();
    for plan in [single(dir.path()), sharded(dir.path())] {
        let export = plan.create().unwrap();
        let _receipt = write_all(&plan, 1.0);
        let begun = names_in(dir.path());
        export.leave();
        assert_eq!(names_in(dir.path()), begun);
        let export = plan.create().unwrap();
        assert_eq!(names_in(dir.path()), begun);
        export.abort().unwrap();
    }
}

#[test]
fn full_disk_error_suggests_freeing_space() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    let export = plan.create().unwrap();
    let temporary = dir.path().join("model.safetensors.tmp");
    fs::remove_file(&temporary).unwrap();
    symlink("/dev/full", &temporary).unwrap();
    let mut writer = plan.writer();
    let error = writer.write_rows_f64("w", 0, &[1.0; 8]).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Write, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("model.safetensors.tmp") && text.contains("free space"), "{text}");

    // A commit after the error does not finish the file either. The export did not create the file at the
    // temporary path, so it keeps it, and the next export refuses to start.
    let error = export.commit([]).unwrap_err();
    assert!(error.to_string().contains("were never written"), "{error}");
    assert_eq!(names_in(dir.path()), ["model.safetensors.tmp"]);
    let error = plan.create().unwrap_err();
    assert!(matches!(error, Error::WrongPath { .. }), "{error}");
}

#[test]
fn rejects_replaced_or_truncated_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    for exchange in [true, false] {
        let export = plan.create().unwrap();
        let receipt = write_all(&plan, 1.0);
        let temporary = dir.path().join("model.safetensors.tmp");
        if exchange {
            let copy = fs::read(&temporary).unwrap();
            fs::remove_file(&temporary).unwrap();
            fs::write(&temporary, copy).unwrap();
        } else {
            fs::File::options().write(true).open(&temporary).unwrap().set_len(8).unwrap();
        }
        let error = export.commit([receipt]).unwrap_err();
        assert!(error.to_string().contains("not a regular file of the planned length"), "{error}");
        assert!(!dir.path().join("model.safetensors").exists());
    }
}

#[test]
fn missing_or_non_directory_parent_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), b"").unwrap();
    for parent in ["none", "file"] {
        let error = single(&dir.path().join(parent)).create().unwrap_err();
        assert!(matches!(error, Error::Io { action: FileAction::Create, .. }), "{error}");
        assert!(error.to_string().contains("check"), "{error}");
    }
    assert_eq!(names_in(dir.path()), ["file"]);
}

#[test]
fn failed_create_removes_created_files() {
    let dir = tempfile::tempdir().unwrap();
    let obstacle = "model-00002-of-00002.safetensors.tmp";
    fs::create_dir(dir.path().join(obstacle)).unwrap();
    let error = sharded(dir.path()).create().unwrap_err();
    assert!(error.to_string().contains("not a regular file of the planned length"), "{error}");
    assert_eq!(names_in(dir.path()), [obstacle]);
}

#[test]
fn failed_rename_removes_temporary_and_renamed_files() {
    let dir = tempfile::tempdir().unwrap();
    let obstacle = "model-00002-of-00002.safetensors";
    fs::create_dir(dir.path().join(obstacle)).unwrap();
    let plan = sharded(dir.path());
    let export = plan.create().unwrap();
    let error = export.commit([write_all(&plan, 1.0)]).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Rename, .. }), "{error}");
    assert_eq!(names_in(dir.path()), [obstacle]);
}

#[test]
fn second_export_to_same_path_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    let export = plan.create().unwrap();
    let error = plan.create().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    export.commit([write_all(&plan, 1.0)]).unwrap();
}

#[test]
fn leftover_temporary_and_finished_files_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors.tmp"), vec![7; 5000]).unwrap();
    let plan = single(dir.path());
    for value in [1.0, 2.0] {
        let export = plan.create().unwrap();
        export.commit([write_all(&plan, value)]).unwrap();
        let file = SafetensorsReader::open(plan.path()).unwrap();
        let mut out = [0; 4];
        file.read_at("w", 28, &mut out).unwrap();
        assert_eq!(f64::from(f32::from_le_bytes(out)), value);
    }
    assert_eq!(names_in(dir.path()), ["model.safetensors"]);
}

#[test]
fn failed_export_keeps_existing_file() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    let export = plan.create().unwrap();
    export.commit([write_all(&plan, 1.0)]).unwrap();
    let before = fs::read(plan.path()).unwrap();
    plan.create().unwrap().commit([]).unwrap_err();
    assert_eq!(fs::read(plan.path()).unwrap(), before);
    assert_eq!(names_in(dir.path()), ["model.safetensors"]);
}

#[test]
fn rejects_rows_missing_or_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    let commit = |parts: &[(usize, usize)]| {
        let export = plan.create().unwrap();
        let receipts: Vec<Receipt> = parts
            .iter()
            .map(|&(first, count)| {
                let mut writer = plan.writer();
                writer.write_rows_f64("w", first, &vec![1.0; count * 2]).unwrap();
                writer.finish().unwrap()
            })
            .collect();
        export.commit(receipts)
    };
    for (parts, missing) in
        [(&[][..], 0..4), (&[(0, 3)][..], 3..4), (&[(1, 3)][..], 0..1), (&[(0, 1), (2, 2)][..], 1..2)]
    {
        let error = commit(parts).unwrap_err();
        let expected = format!("rows {}..{} of tensor `w` were never written", missing.start, missing.end);
        assert!(
            matches!(&error, Error::Unplanned { reason, .. } if reason.starts_with(&expected)),
            "{error}"
        );
    }
    for parts in [&[(0, 4), (1, 2)][..], &[(0, 3), (2, 2)][..], &[(0, 4), (0, 4)][..]] {
        let error = commit(parts).unwrap_err();
        assert!(error.to_string().contains("were written more than once"), "{error}");
    }
    assert_eq!(names_in(dir.path()), [""; 0]);
    // Empty writes are not required, and do no harm.
    commit(&[(2, 0), (0, 2), (2, 2), (4, 0)]).unwrap();
}

#[test]
fn rejects_receipts_of_another_export() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (plan, other_plan) = (single(dir.path()), single(other.path()));
    let (export, _other_export) = (plan.create().unwrap(), other_plan.create().unwrap());
    let error = export.commit([write_all(&other_plan, 1.0)]).unwrap_err();
    assert!(error.to_string().contains("was given a receipt for"), "{error}");
}

#[test]
fn rejects_single_file_and_sharded_model_in_same_directory() {
    let dir = tempfile::tempdir().unwrap();
    let plan = single(dir.path());
    let export = plan.create().unwrap();
    export.commit([write_all(&plan, 1.0)]).unwrap();
    assert!(sharded(dir.path()).create().unwrap_err().to_string().contains("ambiguous"));

    let dir = tempfile::tempdir().unwrap();
    let plan = sharded(dir.path());
    let export = plan.create().unwrap();
    export.commit([write_all(&plan, 1.0)]).unwrap();
    assert!(single(dir.path()).create().unwrap_err().to_string().contains("ambiguous"));
}

#[test]
fn rejects_writes_not_matching_plan() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = vec![
        spec("w", TensorType::F16, &[4, 2]),
        spec("i", TensorType::I64, &[2]),
        spec("none", TensorType::F32, &[3, 0]),
    ];
    let plan = ExportPlan::new(dir.path().join("m"), tensors, Metadata::new()).unwrap();
    let _export = plan.create().unwrap();
    let mut writer = plan.writer();
    assert!(matches!(writer.write_rows("x", 0, &[]).unwrap_err(), Error::BadRequest { .. }));
    let error = writer.write_rows("w", 0, &[0; 6]).unwrap_err();
    let says = |error: Error, what: &str| match error {
        Error::BadRequest { reason, .. } => assert!(reason.contains(what), "{reason}"),
        other => panic!("{other}"),
    };
    says(error, "a multiple of 4 bytes was expected for rows of tensor `w`, the buffer has 6");
    let error = writer.write_rows_f64("w", 0, &[0.0; 3]).unwrap_err();
    says(error, "a multiple of 2 elements was expected for rows of tensor `w`, the buffer has 3");
    let error = writer.write_rows_f64("w", 3, &[0.0; 4]).unwrap_err();
    says(error, "rows 3..5 of tensor `w` do not exist: it has 4 rows");
    let error = writer.write_rows("w", usize::MAX, &[0; 4]).unwrap_err();
    says(error, "do not exist");
    let error = writer.write_rows("none", 0, &[0; 4]).unwrap_err();
    says(error, "a multiple of 0 bytes was expected");
    says(writer.write_rows_f64("i", 0, &[0.0; 2]).unwrap_err(), "tensor `i` is I64, but only F64");
    let error = writer.write_rows_f64("w", 1, &[1.0, 2.0, 3.0, 7e4]).unwrap_err();
    says(error, "7e4 (element 5) does not fit in F16");
}

#[test]
fn write_without_created_export_fails() {
    let dir = tempfile::tempdir().unwrap();
    let error = single(dir.path()).writer().write_rows_f64("w", 0, &[0.0; 8]).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Open, .. }), "{error}");
}
