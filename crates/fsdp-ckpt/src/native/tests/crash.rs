//! Interrupts a save at every point, and checks what a restart finds.

use std::num::NonZeroUsize;

use super::*;
use crate::files::testing::Fault;

/// The work of a process: saves step 2 and keeps one checkpoint.
///
/// Returns whether the checkpoint was committed, and the result.
fn work(files: &FaultyFiles, plan: &SavePlan) -> (bool, Result<(), Error>) {
    let mut is_committed = false;
    let ended = (|| {
        let lock = run_dir(files).lock()?;
        lock.remove_leftovers()?;
        save(&lock, plan, 2, &mut is_committed)?;
        lock.keep_last(NonZeroUsize::MIN, u64::MAX, &[])
    })();
    (is_committed, ended)
}

/// A run that has saved step 1 and left an interrupted save and an interrupted deletion, and has ended.
fn before(plan: &SavePlan) -> FaultyFiles {
    let files = FaultyFiles::new();
    let run = run_dir(&files);
    let lock = run.lock().unwrap();
    let crashed = RankSave::create(&run, lock.attempt(), plan, 2, 0).unwrap();
    drop(crashed);
    save(&lock, plan, 1, &mut false).unwrap();
    drop(lock);
    files.restart(Survival::Everything)
}

/// Checks that, after any interruption, the newest checkpoint is the old or the new one, is complete, and saving works.
fn check_restart(files: &FaultyFiles, plan: &SavePlan, is_committed: bool) {
    let run = run_dir(files);
    let lock = run.lock().unwrap();
    lock.remove_leftovers().unwrap();
    let (newest, _) = run.newest().unwrap().unwrap();
    assert!(newest == 2 || (newest == 1 && !is_committed), "step {newest} is the newest");
    // Every checkpoint that looks complete is complete.
    run.steps().unwrap().into_iter().for_each(|step| check(files, plan, step));
    save(&lock, plan, 3, &mut false).unwrap();
    lock.keep_last(NonZeroUsize::MIN, u64::MAX, &[]).unwrap();
    assert_eq!(run.steps().unwrap(), [3]);
    check(files, plan, 3);
    let names = Files::of(std::sync::Arc::new(files.clone())).list(Path::new("/run/checkpoints")).unwrap();
    assert_eq!(names, ["step-00000003"]);
}

fn operations(start: &FaultyFiles, plan: &SavePlan) -> u64 {
    let files = start.with(Fault::None);
    let (is_committed, ended) = work(&files, plan);
    ended.unwrap();
    assert!(is_committed);
    files.operations()
}

fn survives_every_crash(world: usize) {
    let plan = plan(world);
    let start = before(&plan);
    let count = operations(&start, &plan);
    let (mut old, mut new) = (0, 0);
    for at in 0..=count {
        let files = start.with(Fault::CrashAt(at));
        let (is_committed, ended) = work(&files, &plan);
        assert_eq!(ended.is_ok(), at == count, "the power went at operation {at}");
        for survival in SURVIVALS {
            let after = files.restart(survival);
            match run_dir(&after).newest().unwrap() {
                Some((2, _)) => new += 1,
                _ => old += 1,
            }
            check_restart(&after, &plan, is_committed);
        }
    }
    assert!(old > 100 && new > 50, "both outcomes occur: {old} {new}");
}

#[test]
fn one_rank_save_survives_crash_at_every_operation() {
    survives_every_crash(1);
}

#[test]
fn four_rank_save_survives_crash_at_every_operation() {
    survives_every_crash(4);
}

#[test]
fn second_crash_during_restart_is_survived() {
    let plan = plan(2);
    let start = before(&plan);
    let count = operations(&start, &plan);
    for at in (0..=count).step_by(3) {
        let files = start.with(Fault::CrashAt(at));
        let (is_committed, _) = work(&files, &plan);
        for survival in [Survival::Nothing, Survival::Everything, Survival::Chance(at)] {
            let again = files.restart(survival).with(Fault::CrashAt((at * 7 + 5) % 40));
            let run = run_dir(&again);
            let _ = run.lock().and_then(|lock| lock.remove_leftovers());
            check_restart(&again.restart(Survival::Chance(at + 1)), &plan, is_committed);
        }
    }
}

#[test]
fn first_checkpoint_survives_immediate_crash() {
    let (files, plan) = (FaultyFiles::new(), plan(2));
    Files::of(std::sync::Arc::new(files.clone())).create_directory_if_absent(Path::new("/run")).unwrap();
    let files = files.restart(Survival::Everything);
    let lock = run_dir(&files).lock().unwrap();
    save(&lock, &plan, 1, &mut false).unwrap();
    for survival in SURVIVALS {
        check(&files.restart(survival), &plan, 1);
    }
}

/// Makes every operation fail in turn; returns how many failures went unnoticed.
fn survives_every_failure(world: usize, fault: fn(u64) -> Fault) -> usize {
    let plan = plan(world);
    let start = before(&plan);
    let count = operations(&start, &plan);
    let mut tolerated = 0;
    for at in 0..count {
        let files = start.with(fault(at));
        let (is_committed, ended) = work(&files, &plan);
        match ended {
            Ok(()) => tolerated += 1,
            Err(error) => assert!(error.to_string().contains("made to fail"), "operation {at}: {error}"),
        }
        check_restart(&files.with(Fault::None), &plan, is_committed);
        // The same after a power failure before anything is repaired.
        for survival in SURVIVALS {
            check_restart(&files.restart(survival), &plan, is_committed);
        }
    }
    tolerated
}

#[test]
fn one_rank_save_survives_failure_of_every_operation() {
    assert_eq!(survives_every_failure(1, Fault::FailAt), 0, "no failure goes unnoticed");
}

#[test]
fn four_rank_save_survives_failure_of_every_operation() {
    assert_eq!(survives_every_failure(4, Fault::FailAt), 0, "no failure goes unnoticed");
}

#[test]
fn operations_that_succeed_but_report_failure_are_survived() {
    for world in [1, 4] {
        let tolerated = survives_every_failure(world, Fault::LieAt);
        assert_eq!(tolerated, 1, "the rename of a save is looked after");
    }
}

#[test]
fn late_write_of_earlier_attempt_does_not_affect_save() {
    let (files, plan) = (FaultyFiles::new(), plan(2));
    let run = run_dir(&files);
    let zombie = run.lock().unwrap();
    let attempt = zombie.attempt();
    // Without locks, as seen from another machine.
    let files = files.with(Fault::NoLocks);
    let lock = run_dir(&files).lock().unwrap();
    let late = RankSave::create(lock.run(), attempt, &plan, 7, 1).unwrap();
    save(&lock, &plan, 7, &mut false).unwrap();
    drop(late);
    check(&files, &plan, 7);
    lock.remove_leftovers().unwrap();
    check(&files, &plan, 7);
}

#[test]
fn second_save_of_step_succeeds_only_with_same_content() {
    let (files, plan) = (FaultyFiles::new(), plan(2));
    let files = files.with(Fault::NoLocks);
    let [one, same, other] = [(); 3].map(|()| run_dir(&files).lock().unwrap());
    let parts = [&one, &same, &other].map(|lock| save_parts(lock, &plan, 7).unwrap());
    let state = |step: u64| json!({ "step": step }).as_object().cloned().unwrap();
    let [first, second, third] = parts;
    one.commit(&plan, 7, state(7), first).unwrap();
    same.commit(&plan, 7, state(7), second).unwrap();
    let error = other.commit(&plan, 7, state(8), third).unwrap_err().to_string();
    assert!(error.contains("two runs write here"), "{error}");
    other.discard(7).unwrap();
    check(&files, &plan, 7);
    let names = Files::of(std::sync::Arc::new(files)).list(Path::new("/run/checkpoints")).unwrap();
    assert_eq!(names, ["step-00000007"]);
}

#[test]
fn full_disk_fails_save_and_keeps_old_checkpoint() {
    for world in [1, 4] {
        let plan = plan(world);
        let start = before(&plan);
        let used = start.bytes();
        let (mut failed, mut room) = (0, 0);
        loop {
            let files = start.with(Fault::FullAt(used + room));
            let (is_committed, ended) = work(&files, &plan);
            check_restart(&files.with(Fault::None), &plan, is_committed);
            match ended {
                Ok(()) => break,
                Err(error) => assert!(is_storage_full(&error), "{room} bytes of room: {error}"),
            }
            (failed, room) = (failed + 1, room + 29);
        }
        assert!(failed > 20, "{failed}");
    }
}

fn is_storage_full(error: &Error) -> bool {
    let full = std::io::Error::from(std::io::ErrorKind::StorageFull).to_string();
    error.to_string().contains(&full)
}
