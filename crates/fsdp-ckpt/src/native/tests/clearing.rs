//! Interrupts clearing, going back and setting aside at every point, and checks what a restart finds.

use std::num::NonZeroUsize;

use super::*;
use crate::files::testing::Fault;

/// An operation on the checkpoints of a run.
type Work = fn(&RunLock) -> Result<(), Error>;

/// A run that has saved steps 1 to 3 and keeps other files next to them.
fn before(plan: &SavePlan) -> FaultyFiles {
    let files = FaultyFiles::new();
    let run = run_dir(&files);
    let lock = run.lock().unwrap();
    (1..=3).for_each(|step| save(&lock, plan, step, &mut false).unwrap());
    let disk = Files::of(std::sync::Arc::new(files.clone()));
    disk.create_directory_if_absent(&run.checkpoints().join("step-00000004.diverged")).unwrap();
    disk.create_new(&run.checkpoints().join("reserve")).unwrap();
    drop(lock);
    files.restart(Survival::Everything)
}

/// Crashes at every operation of `work`, and passes what a restart finds to `check`; returns the number of crashes.
fn at_every_crash(start: &FaultyFiles, work: Work, mut check: impl FnMut(&FaultyFiles)) -> u64 {
    let whole = |files: &FaultyFiles| work(&run_dir(files).lock()?);
    let files = start.with(Fault::None);
    whole(&files).unwrap();
    let count = files.operations();
    for at in 0..=count {
        let files = start.with(Fault::CrashAt(at));
        assert_eq!(whole(&files).is_ok(), at == count, "the power went at operation {at}");
        SURVIVALS.iter().for_each(|&survival| check(&files.restart(survival)));
    }
    count
}

fn names(files: &FaultyFiles) -> Vec<String> {
    Files::of(std::sync::Arc::new(files.clone())).list(Path::new("/run/checkpoints")).unwrap()
}

#[test]
fn crash_while_clearing_leaves_all_checkpoints_or_none() {
    let plan = plan(2);
    let start = before(&plan);
    let (mut all, mut none, mut begun) = (0, 0, 0);
    let clear: Work = |lock| {
        lock.clear()?;
        lock.remove_cleared()
    };
    at_every_crash(&start, clear, |after| {
        let run = run_dir(after);
        let steps = run.steps().unwrap();
        match steps.as_slice() {
            [1, 2, 3] => {
                steps.iter().for_each(|&step| check(after, &plan, step));
                all += 1;
            }
            [] => none += 1,
            _ => panic!("a part is left: {steps:?}"),
        }
        let lock = run.lock().unwrap();
        begun += u64::from(steps.is_empty() && lock.is_clearing().unwrap());
        // The next run completes the clearing, and its own save is the only checkpoint.
        lock.clear().unwrap();
        lock.remove_cleared().unwrap();
        assert!(!lock.is_clearing().unwrap());
        save(&lock, &plan, 1, &mut false).unwrap();
        assert_eq!(names(after), ["step-00000001"]);
        check(after, &plan, 1);
    });
    assert!(all > 10 && none > 10, "both outcomes occur: {all} {none}");
    assert!(begun > 10, "a restart knows that clearing was under way: {begun}");
}

#[test]
fn delete_after_removes_newest_checkpoints_first() {
    let plan = plan(2);
    let start = before(&plan);
    let mut seen = std::collections::BTreeSet::new();
    at_every_crash(
        &start,
        |lock| lock.delete_after(1),
        |after| {
            let steps = run_dir(after).steps().unwrap();
            assert!([&[1, 2, 3][..], &[1, 2], &[1]].contains(&steps.as_slice()), "{steps:?}");
            steps.iter().for_each(|&step| check(after, &plan, step));
            seen.insert(steps);
        },
    );
    assert_eq!(seen.len(), 3);
}

#[test]
fn crash_while_setting_aside_keeps_checkpoint_sound() {
    let plan = plan(1);
    let start = before(&plan);
    let mut seen = std::collections::BTreeSet::new();
    at_every_crash(
        &start,
        |lock| lock.set_aside(3, "unsound").map(drop),
        |after| {
            let run = run_dir(after);
            let steps = run.steps().unwrap();
            let aside = run.checkpoints().join("step-00000003.unsound");
            let kept = if steps.contains(&3) { run.checkpoint(3) } else { aside };
            open(after, &kept).unwrap().verify().unwrap();
            seen.insert(steps);
        },
    );
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [vec![1, 2], vec![1, 2, 3]]);
}

#[test]
fn set_aside_checkpoint_is_replaceable_and_survives_cleanup() {
    let plan = plan(1);
    let files = before(&plan);
    let lock = run_dir(&files).lock().unwrap();
    lock.set_aside(3, "unsound").unwrap();
    save(&lock, &plan, 3, &mut false).unwrap();
    let aside = lock.set_aside(3, "unsound").unwrap().unwrap();
    lock.remove_leftovers().unwrap();
    open(&files, &aside).unwrap().verify().unwrap();
    assert_eq!(lock.run().newest().unwrap().unwrap().0, 2);
}

#[test]
fn concurrent_deletion_of_same_checkpoints_succeeds() {
    let plan = plan(2);
    let start = before(&plan);
    for _ in 0..200 {
        let files = start.with(Fault::NoLocks);
        let begin = std::sync::Barrier::new(2);
        let delete = || {
            let lock = run_dir(&files).lock().unwrap();
            begin.wait();
            lock.keep_last(NonZeroUsize::MIN, 3, &[])
        };
        let ended = std::thread::scope(|scope| {
            [scope.spawn(delete), scope.spawn(delete)].map(|one| one.join().unwrap())
        });
        ended.into_iter().for_each(Result::unwrap);
        assert_eq!(names(&files), ["reserve", "step-00000003", "step-00000004.diverged"]);
        check(&files, &plan, 3);
    }
}

#[test]
fn lock_is_not_exclusive_without_lock_support() {
    let files = FaultyFiles::new();
    let alone = run_dir(&files).lock().unwrap();
    assert!(alone.is_exclusive());
    drop(alone);
    let files = files.with(Fault::NoLocks);
    let (first, second) = (run_dir(&files).lock().unwrap(), run_dir(&files).lock().unwrap());
    assert!(!first.is_exclusive() && !second.is_exclusive());
}

#[test]
fn symlinked_checkpoints_directory_is_not_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let (out, other) = (dir.path().join("out"), dir.path().join("other"));
    std::fs::create_dir_all(other.join("step-00000001")).unwrap();
    std::fs::create_dir(&out).unwrap();
    std::os::unix::fs::symlink(&other, out.join(RunDir::CHECKPOINTS)).unwrap();
    let lock = RunDir::new(&out).lock().unwrap();
    let error = lock.clear().unwrap_err().to_string();
    assert!(error.contains("is a link"), "{error}");
    assert_eq!(lock.run().steps().unwrap(), [1]);
}
