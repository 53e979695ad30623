//! Ranks as threads that meet in the directory only: what they save is what is read, and every failure is told.

use std::{
    fs,
    num::NonZeroUsize,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use fsdp_ckpt::{
    Error, NativeFault, SaveFault,
    checkpoint::{Key, Role},
    formats,
    native::{NativeReader, RankSave, RunDir, RunLock, SavePlan, SavedTensor, WaitLimit, even_rows},
    safetensors::TensorType,
};
use serde_json::{Map, Value, json};

use super::{names_in, spec};

static NEVER: AtomicBool = AtomicBool::new(false);
const PATIENT: WaitLimit<'static> = WaitLimit { limit: Duration::from_secs(60), stop: &NEVER };
const HASTY: WaitLimit<'static> = WaitLimit { limit: Duration::from_millis(20), stop: &NEVER };

fn parameter(name: &str, dtype: TensorType, shape: &[usize], world: usize) -> SavedTensor {
    let rows = even_rows(shape.first().copied().unwrap_or(1), world);
    let path = vec![Key::Name(name.to_owned())];
    SavedTensor { spec: spec(name, dtype, shape), path, role: Role::Model, rows }
}

/// A small training state in the shapes that occur: parameters, moments, a step, empty tensors.
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

/// The bytes of rows: other ones for each tensor, row and seed.
fn rows_of(name: &str, first: usize, count: usize, row_bytes: usize, seed: u8) -> Vec<u8> {
    let salt = name.bytes().fold(seed, |salt, byte| salt.wrapping_mul(31).wrapping_add(byte));
    let byte = |index: usize| (index.wrapping_mul(2_654_435_761) >> 7) as u8 ^ salt;
    (first * row_bytes..(first + count) * row_bytes).map(byte).collect()
}

fn row_bytes(tensor: &SavedTensor) -> usize {
    tensor.spec.shape.iter().skip(1).product::<usize>() * tensor.spec.dtype.size_bytes()
}

fn write_part(save: &mut RankSave, plan: &SavePlan, rank: usize, seed: u8) {
    for tensor in plan.tensors() {
        let (rows, name) = (tensor.rows[rank].clone(), tensor.spec.name.as_str());
        if rows.is_empty() {
            continue;
        }
        // In two pieces, as a trainer that gathers its rows piece by piece would.
        let cut = rows.start + rows.len() / 2;
        for part in [rows.start..cut, cut..rows.end] {
            let bytes = rows_of(name, part.start, part.len(), row_bytes(tensor), seed);
            save.write_rows(name, part.start, &bytes).unwrap();
        }
    }
}

fn run_state(step: u64) -> Map<String, Value> {
    let state = json!({"step": step, "lr": 0.1 + 0.2, "seed": u64::MAX});
    state.as_object().unwrap().clone()
}

/// Saves by `world` threads that meet in the directory only.
pub(super) fn save(lock: &RunLock, plan: &SavePlan, step: u64, seed: u8) {
    let run = lock.run();
    thread::scope(|scope| {
        for rank in 1..plan.world_size() {
            scope.spawn(move || {
                let mut part = RankSave::create(run, plan, step, rank).unwrap();
                write_part(&mut part, plan, rank, seed);
                let complete = part.finish().unwrap().wait(PATIENT).unwrap();
                assert_eq!(complete, run.checkpoint(step));
            });
        }
        let mut part = RankSave::create(run, plan, step, 0).unwrap();
        write_part(&mut part, plan, 0, seed);
        let _done = part.finish().unwrap();
        lock.commit(plan, step, run_state(step), PATIENT).unwrap();
    });
}

/// Reads every tensor in `cuts` parts and compares it.
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

fn save_fault(error: &Error) -> &SaveFault {
    match error {
        Error::Save { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn tensors_that_differ_are_all_named_with_both_shapes_and_types() {
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
fn files_of_ranks_without_their_manifest_are_no_checkpoint() {
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
fn all_files_that_are_missing_or_cut_are_named_at_once() {
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
fn what_four_threads_save_reads_back_at_any_world_size() {
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
    lock.keep_last(NonZeroUsize::new(2).unwrap()).unwrap();
    assert_eq!(run.steps().unwrap(), [100, 150]);
    lock.delete_after(100).unwrap();
    assert_eq!(names_in(&dir.path().join("run/checkpoints")), ["step-00000100"]);
    check(&run.checkpoint(100), &plan(1), 100, 100, 3);
}

#[test]
fn a_run_is_locked_once_and_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    assert_eq!(*save_fault(&run.lock().unwrap_err()), SaveFault::Locked);
    drop(lock);
    drop(run.lock().unwrap());
}

#[test]
fn leftovers_are_no_checkpoints_and_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let checkpoints = dir.path().join("checkpoints");
    for name in ["step-00000010.tmp", "step-00000005.old.tmp", "step-7", "step-0000000x", "notes.tmp"] {
        fs::create_dir(checkpoints.join(name)).unwrap();
        fs::write(checkpoints.join(name).join("rank-0.done"), "x").unwrap();
    }
    assert_eq!(run.newest().unwrap(), None);
    lock.remove_leftovers().unwrap();
    assert_eq!(names_in(&checkpoints), ["notes.tmp", "step-0000000x", "step-7"]);
}

#[test]
fn the_failure_of_a_rank_fails_the_save_on_all_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(3);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut part = RankSave::create(&run, &plan, 5, 1).unwrap();
            write_part(&mut part, &plan, 1, 0);
            part.finish().unwrap().wait(PATIENT).unwrap_err()
        });
        RankSave::create(&run, &plan, 5, 2).unwrap().fail("the disk is on fire");
        let mut part = RankSave::create(&run, &plan, 5, 0).unwrap();
        write_part(&mut part, &plan, 0, 0);
        let _done = part.finish().unwrap();
        let told = SaveFault::RankFailed { rank: 2, reason: "the disk is on fire".to_owned() };
        assert_eq!(*save_fault(&lock.commit(&plan, 5, Map::new(), PATIENT).unwrap_err()), told);
        let error = waiting.join().unwrap();
        assert!(matches!(save_fault(&error), SaveFault::RankFailed { .. } | SaveFault::CommitFailed { .. }));
    });
    assert_eq!(run.newest().unwrap(), None);
}

#[test]
fn a_dropped_part_and_a_part_with_missing_rows_fail_the_save() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(1);
    let part = RankSave::create(&run, &plan, 1, 0).unwrap();
    let error = part.finish().unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::RowsNotWritten { .. }), "{error}");
    let error = lock.commit(&plan, 1, Map::new(), PATIENT).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::RankFailed { rank: 0, .. }), "{error}");
    drop(RankSave::create(&run, &plan, 2, 0).unwrap());
    let error = lock.commit(&plan, 2, Map::new(), PATIENT).unwrap_err();
    assert!(error.to_string().contains("gave up"), "{error}");
}

#[test]
fn a_late_rank_fails_the_save_and_learns_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(2);
    let parts: Vec<RankSave> = (0..2).map(|rank| RankSave::create(&run, &plan, 1, rank).unwrap()).collect();
    let mut parts = parts.into_iter();
    let (mut first, mut second) = (parts.next().unwrap(), parts.next().unwrap());
    write_part(&mut first, &plan, 0, 0);
    let _done = first.finish().unwrap();
    let error = lock.commit(&plan, 1, Map::new(), HASTY).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::RanksLate { ranks, .. } if ranks == &[1]), "{error}");
    write_part(&mut second, &plan, 1, 0);
    let error = second.finish().unwrap().wait(PATIENT).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::CommitFailed { .. }), "{error}");
}

#[test]
fn a_rank_that_waited_too_long_withdraws_and_the_commit_fails() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(2);
    let mut part = RankSave::create(&run, &plan, 1, 1).unwrap();
    write_part(&mut part, &plan, 1, 0);
    let error = part.finish().unwrap().wait(HASTY).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::CommitLate { .. }), "{error}");
    let mut part = RankSave::create(&run, &plan, 1, 0).unwrap();
    write_part(&mut part, &plan, 0, 0);
    let _done = part.finish().unwrap();
    let error = lock.commit(&plan, 1, Map::new(), PATIENT).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::RankFailed { rank: 1, .. }), "{error}");
}

#[test]
fn a_wait_can_be_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(2);
    let mut part = RankSave::create(&run, &plan, 1, 0).unwrap();
    write_part(&mut part, &plan, 0, 0);
    let _done = part.finish().unwrap();
    let stop = AtomicBool::new(false);
    stop.store(true, Ordering::Relaxed);
    let error = lock.commit(&plan, 1, Map::new(), WaitLimit { stop: &stop, ..PATIENT }).unwrap_err();
    assert_eq!(*save_fault(&error), SaveFault::Stopped);
}

#[test]
fn rejects_a_second_checkpoint_of_a_step_and_a_second_file_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let plan = plan(1);
    save(&lock, &plan, 3, 1);
    let error = RankSave::create(&run, &plan, 3, 0).unwrap_err();
    assert_eq!(*save_fault(&error), SaveFault::AlreadyThere);
    let _part = RankSave::create(&run, &plan, 4, 0).unwrap();
    let error = RankSave::create(&run, &plan, 4, 0).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    check(&run.checkpoint(3), &plan, 3, 1, 1);
}

#[test]
fn rejects_a_rank_that_saved_by_another_plan() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let lock = run.lock().unwrap();
    let (plan, other) = (plan(2), plan(3));
    for (rank, plan) in [(0, &plan), (1, &other)] {
        let mut part = RankSave::create(&run, plan, 1, rank).unwrap();
        write_part(&mut part, plan, rank, 0);
        let _done = part.finish().unwrap();
    }
    let error = lock.commit(&plan, 1, Map::new(), PATIENT).unwrap_err();
    assert_eq!(*save_fault(&error), SaveFault::OtherPlan { rank: 1 });
}

#[test]
fn rejects_rows_that_do_not_fit_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let _lock = run.lock().unwrap();
    let plan = plan(2);
    let mut part = RankSave::create(&run, &plan, 1, 1).unwrap();
    let error = part.write_rows("step", 0, &[0; 8]).unwrap_err();
    assert!(matches!(error, Error::UnknownTensor { .. }), "{error}");
    let error = part.write_rows("w", 19, &[0; 15]).unwrap_err();
    assert!(matches!(error, Error::BufferLength { expected: 16, got: 15, .. }), "{error}");
    let error = part.write_rows("w", 20, &[0; 16]).unwrap_err();
    assert!(matches!(save_fault(&error), SaveFault::OutOfOrder { expected: 19, got: 20, .. }), "{error}");
    let error = part.write_rows("w", 19, &[0; 19 * 16]).unwrap_err();
    assert!(matches!(error, Error::RowsOutsideTensor { .. }), "{error}");
    let error = part.write_rows("mask", 3, &[0; 1]).unwrap_err();
    assert!(matches!(error, Error::BufferLength { expected: 0, .. }), "{error}");
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
    assert!(matches!(&error, Error::Native { fault, .. } if **fault == NativeFault::ForeignFile), "{error}");
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let shard = path.join("shard-00002-model-00001-of-00001.safetensors");
    fs::remove_file(shard).unwrap();
    let error = NativeReader::open(&path).unwrap_err().to_string();
    assert!(error.contains("shard-00002"), "{error}");
    fs::remove_file(path.join("manifest.json")).unwrap();
    let error = NativeReader::open(&path).unwrap_err().to_string();
    assert!(error.contains("manifest.json"), "{error}");
}
