//! Saves by ranks that are threads: readers get what was saved, and every failure is reported.

use std::{fs, num::NonZeroUsize, path::Path, thread};

use fsdp_ckpt::{
    Error,
    checkpoint::{Key, Role},
    formats,
    native::{NativeReader, RankSave, RunDir, RunLock, SavePlan, SavedTensor, even_rows},
    safetensors::TensorType,
};
use serde_json::{Map, Value, json};

use super::{names_in, spec};

fn parameter(name: &str, dtype: TensorType, shape: &[usize], world: usize) -> SavedTensor {
    let rows = even_rows(shape.first().copied().unwrap_or(1), world);
    let path = vec![Key::Name(name.to_owned())];
    SavedTensor { spec: spec(name, dtype, shape), path, role: Role::Model, rows }
}

/// Plans a small training state with every kind of tensor: parameters, moments, a step, empty tensors.
pub(super) fn plan(world: usize) -> SavePlan {
    let mut moment = parameter("optim.state.w.exp_avg", TensorType::F32, &[37, 8], world);
    moment.path = ["optim", "state", "w", "exp_avg"].map(|step| Key::Name(step.to_owned())).to_vec();
    moment.role = Role::Optimizer;
    let tensors = vec![
        parameter("w", TensorType::Bf16, &[37, 8], world),
        moment,
        parameter("bias", TensorType::F32, &[3], world),
        parameter("step", TensorType::I64, &[], world),
        parameter("mask", TensorType::Bool, &[5, 0], world),
        parameter("none", TensorType::F64, &[0, 4], world),
    ];
    SavePlan::new(world, tensors).unwrap()
}

/// Returns the bytes of some rows; they differ by tensor, row and seed.
fn rows_of(name: &str, first: usize, count: usize, row_bytes: usize, seed: u8) -> Vec<u8> {
    let salt = name.bytes().fold(seed, |salt, byte| salt.wrapping_mul(31).wrapping_add(byte));
    let byte = |index: usize| (index.wrapping_mul(2_654_435_761) >> 7) as u8 ^ salt;
    (first * row_bytes..(first + count) * row_bytes).map(byte).collect()
}

fn row_bytes(tensor: &SavedTensor) -> usize {
    tensor.spec.shape.iter().skip(1).product::<usize>() * tensor.spec.dtype.size_bytes()
}

pub(super) fn write_part(save: &mut RankSave, plan: &SavePlan, rank: usize, seed: u8) {
    for tensor in plan.tensors() {
        let (rows, name) = (tensor.rows[rank].clone(), tensor.spec.name.as_str());
        if rows.is_empty() {
            continue;
        }
        // Two writes, like a trainer that gathers its rows piece by piece.
        let cut = rows.start + rows.len() / 2;
        for part in [rows.start..cut, cut..rows.end] {
            let bytes = rows_of(name, part.start, part.len(), row_bytes(tensor), seed);
            save.write_rows(name, part.start, &bytes).unwrap();
        }
    }
}

pub(super) fn run_state(step: u64) -> Map<String, Value> {
    let state = json!({"step": step, "lr": 0.1 + 0.2, "seed": u64::MAX});
    state.as_object().unwrap().clone()
}

/// Saves with one thread per rank of the plan.
pub(super) fn save(lock: &RunLock, plan: &SavePlan, step: u64, seed: u8) {
    let run = lock.run();
    let part = |rank| {
        let mut part = RankSave::create(run, lock.attempt(), plan, step, rank).unwrap();
        write_part(&mut part, plan, rank, seed);
        part.finish().unwrap()
    };
    let reports = thread::scope(|scope| {
        let ranks = 0..plan.world_size();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || part(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(lock.commit(plan, step, run_state(step), reports).unwrap(), run.checkpoint(step));
}

/// Reads every tensor in `cuts` parts and compares it with what was saved.
pub(super) fn check(dir: &Path, plan: &SavePlan, step: u64, seed: u8, cuts: usize) {
    let reader = NativeReader::open(dir).unwrap();
    assert_eq!(reader.manifest().run_state, run_state(step));
    reader.check_tensors(plan.tensors().iter().map(|tensor| &tensor.spec)).unwrap();
    for tensor in plan.tensors() {
        for rows in even_rows(tensor.row_count(), cuts) {
            let expected = rows_of(&tensor.spec.name, rows.start, rows.len(), row_bytes(tensor), seed);
            let mut got = vec![0; expected.len()];
            reader.read_rows(&tensor.spec.name, rows, &mut got).unwrap();
            assert_eq!(got, expected, "{}", tensor.spec.name);
        }
    }
    reader.verify().unwrap();
}

#[test]
fn tensor_mismatches_report_expected_and_actual_specs() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path().join("run"));
    let lock = run.lock().unwrap();
    save(&lock, &plan(1), 1, 1);
    let reader = NativeReader::open(run.checkpoint(1)).unwrap();
    let mut expected: Vec<_> = plan(1).tensors().iter().map(|tensor| tensor.spec.clone()).collect();
    expected[0].dtype = TensorType::F32;
    let text = reader.check_tensors(&expected).unwrap_err().to_string();
    assert!(text.contains("1 of the wrong type: `w` (expected F32, got BF16)"), "{text}");
    assert!(!text.contains("shape"), "{text}");
    expected[0].shape = vec![37, 9];
    expected[2].name = "bios".to_owned();
    let text = reader.check_tensors(&expected).unwrap_err().to_string();
    assert!(text.contains("1 missing: `bios`; 1 not expected: `bias`"), "{text}");
    assert!(text.contains("wrong shape: `w` (expected [37, 9], got [37, 8])"), "{text}");
    assert!(text.contains("wrong type: `w` (expected F32, got BF16)"), "{text}");
}

#[test]
fn shards_without_manifest_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path().join("run"));
    let lock = run.lock().unwrap();
    save(&lock, &plan(2), 1, 1);
    let saved = run.checkpoint(1);
    let shard = saved.join("shard-00001-model-00001-of-00001.safetensors");
    let text = formats::open(&shard).unwrap_err().to_string();
    assert!(text.contains("part of a checkpoint; name the directory"), "{text}");
    fs::remove_file(saved.join("manifest.json")).unwrap();
    for path in [&saved, &shard] {
        let text = formats::open(path).unwrap_err().to_string();
        assert!(text.contains("a native checkpoint whose manifest.json is missing"), "{text}");
    }
}

#[test]
fn missing_truncated_and_foreign_files_are_all_reported() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path().join("run"));
    let lock = run.lock().unwrap();
    save(&lock, &plan(4), 1, 1);
    let file =
        |rank: usize| run.checkpoint(1).join(format!("shard-{rank:05}-model-00001-of-00001.safetensors"));
    fs::remove_file(file(1)).unwrap();
    fs::remove_file(file(2)).unwrap();
    fs::OpenOptions::new().write(true).open(file(4)).unwrap().set_len(100).unwrap();
    fs::write(run.checkpoint(1).join("other.safetensors"), b"x").unwrap();
    let error = formats::open(run.checkpoint(1)).unwrap_err();
    let problems: Vec<String> = error.into_problems().iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 4, "{problems:?}");
    for (problem, name) in problems.iter().zip(["other", "shard-00001", "shard-00002", "shard-00004"]) {
        assert!(problem.contains(name), "{problem}");
    }
}

#[test]
fn checkpoints_read_back_at_any_world_size_and_are_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path().join("run"));
    assert_eq!(run.newest().unwrap(), None);
    let lock = run.lock().unwrap();
    lock.remove_leftovers().unwrap();
    for (step, world) in [(50, 4), (100, 1), (150, 7)] {
        save(&lock, &plan(world), step, step as u8);
        let (newest, path) = run.newest().unwrap().unwrap();
        assert_eq!(newest, step);
        let mut expected: Vec<String> =
            (1..=world).map(|number| format!("shard-{number:05}-model-00001-of-00001.safetensors")).collect();
        expected.insert(0, "manifest.json".to_owned());
        assert_eq!(names_in(&path), expected);
        for cuts in [1, 2, 5, 50] {
            check(&path, &plan(world), step, step as u8, cuts);
        }
    }
    // Checkpoints that a diverged run could go back to are kept.
    lock.keep_last(NonZeroUsize::MIN, 50, &[]).unwrap();
    assert_eq!(run.steps().unwrap(), [50, 150]);
    save(&lock, &plan(1), 100, 100);
    // So are the best checkpoints.
    lock.keep_last(NonZeroUsize::MIN, 150, &[50, 70]).unwrap();
    assert_eq!(run.steps().unwrap(), [50, 150]);
    save(&lock, &plan(1), 100, 100);
    lock.keep_last(NonZeroUsize::new(2).unwrap(), 100, &[]).unwrap();
    assert_eq!(run.steps().unwrap(), [100, 150]);
    lock.delete_after(100).unwrap();
    assert_eq!(names_in(&dir.path().join("run/checkpoints")), ["step-00000100"]);
    check(&run.checkpoint(100), &plan(1), 100, 100, 3);
}

#[test]
fn run_lock_is_exclusive_until_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let error = run.lock().unwrap_err();
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("locked")), "{error}");
    drop(lock);
    // A child that another test is starting holds the lock too, until it calls exec.
    while run.lock().is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn leftovers_are_not_checkpoints_and_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let checkpoints = dir.path().join("checkpoints");
    for name in [
        "step-00000010.0123456789abcdef.tmp",
        "step-00000005.old.tmp",
        "step-7",
        "step-0000000x",
        "notes.tmp",
    ] {
        fs::create_dir(checkpoints.join(name)).unwrap();
        fs::write(checkpoints.join(name).join("rank-0.done"), "x").unwrap();
    }
    assert_eq!(run.newest().unwrap(), None);
    lock.remove_leftovers().unwrap();
    assert_eq!(names_in(&checkpoints), ["notes.tmp", "step-0000000x", "step-7"]);
}

#[test]
fn rejects_rank_save_with_missing_rows() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let error = RankSave::create(&run, lock.attempt(), &plan(1), 1, 0).unwrap().finish().unwrap_err();
    assert!(matches!(&error, Error::Unplanned { reason, .. } if reason.contains("not written")), "{error}");
    lock.discard(1).unwrap();
    assert_eq!(names_in(&dir.path().join("checkpoints")), [""; 0]);
}

#[test]
fn commit_reports_removed_save_directory() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(1);
    let mut part = RankSave::create(&run, lock.attempt(), &plan, 1, 0).unwrap();
    write_part(&mut part, &plan, 0, 0);
    let report = part.finish().unwrap();
    let unfinished = format!("checkpoints/step-00000001.{}.tmp", lock.attempt());
    fs::remove_dir_all(dir.path().join(unfinished)).unwrap();
    let error = lock.commit(&plan, 1, Map::new(), vec![report]).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("rank 0 wrote it"), "{error}");
    // The failed save does not block the next one.
    lock.discard(1).unwrap();
    save(&lock, &plan, 1, 1);
}

#[test]
fn rejects_duplicate_step_checkpoint_and_rank_file() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(1);
    save(&lock, &plan, 3, 1);
    let error = RankSave::create(&run, lock.attempt(), &plan, 3, 0).unwrap_err();
    let is_there = |reason: &str| reason.contains("a checkpoint is never overwritten");
    assert!(matches!(&error, Error::WrongPath { reason, .. } if is_there(reason)), "{error}");
    let _part = RankSave::create(&run, lock.attempt(), &plan, 4, 0).unwrap();
    let error = RankSave::create(&run, lock.attempt(), &plan, 4, 0).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    check(&run.checkpoint(3), &plan, 3, 1, 1);
}

#[test]
fn rejects_rank_saved_with_different_plan() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let (plan, other) = (plan(2), plan(3));
    let report = |(rank, plan): (usize, &SavePlan)| {
        let mut part = RankSave::create(&run, lock.attempt(), plan, 1, rank).unwrap();
        write_part(&mut part, plan, rank, 0);
        part.finish().unwrap()
    };
    let reports = [(0, &plan), (1, &other)].map(report).into();
    let error = lock.commit(&plan, 1, Map::new(), reports).unwrap_err();
    let is_other = |reason: &str| reason.starts_with("rank 1 saved different tensors or rows");
    assert!(matches!(&error, Error::Unplanned { reason, .. } if is_other(reason)), "{error}");
}

#[test]
fn rejects_rows_not_matching_plan() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(2);
    let mut part = RankSave::create(&run, lock.attempt(), &plan, 1, 1).unwrap();
    let error = part.write_rows("step", 0, &[0; 8]).unwrap_err();
    assert!(matches!(error, Error::BadRequest { .. }), "{error}");
    let error = part.write_rows("w", 19, &[0; 15]).unwrap_err();
    assert!(error.to_string().contains("a multiple of 16 bytes was expected"), "{error}");
    assert!(error.to_string().contains("`w`, the buffer has 15"), "{error}");
    let error = part.write_rows("w", 20, &[0; 16]).unwrap_err();
    let is_out_of_order =
        |reason: &str| reason.starts_with("row 20 of tensor `w` was written, but row 19 is next");
    assert!(matches!(&error, Error::Unplanned { reason, .. } if is_out_of_order(reason)), "{error}");
    let error = part.write_rows("w", 19, &[0; 19 * 16]).unwrap_err();
    assert!(error.to_string().contains("do not exist"), "{error}");
    let error = part.write_rows("mask", 3, &[0; 1]).unwrap_err();
    assert!(error.to_string().contains("a multiple of 0 bytes was expected"), "{error}");
    part.write_rows("w", 19, &[0; 16]).unwrap();
}

#[test]
fn rejects_missing_files_and_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    save(&lock, &plan(2), 1, 1);
    let path = run.checkpoint(1);
    fs::write(path.join("model.safetensors"), "x").unwrap();
    let error = NativeReader::open(&path).unwrap_err();
    let is_foreign = |reason: &str| reason.starts_with("it is not listed in the manifest");
    assert!(matches!(&error, Error::Malformed { reason, .. } if is_foreign(reason)), "{error}");
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let shard = path.join("shard-00002-model-00001-of-00001.safetensors");
    fs::remove_file(shard).unwrap();
    let error = NativeReader::open(&path).unwrap_err().to_string();
    assert!(error.contains("shard-00002"), "{error}");
    fs::remove_file(path.join("manifest.json")).unwrap();
    let error = NativeReader::open(&path).unwrap_err().to_string();
    assert!(error.contains("manifest.json"), "{error}");
}
