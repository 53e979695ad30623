//! Reserved disk space, on a disk that others fill.

use super::*;
use crate::files::testing::Fault;

/// The number of bytes that a save of a plan actually leaves on the disk.
fn saved_bytes(plan: &SavePlan) -> usize {
    let files = FaultyFiles::new();
    save(&run_dir(&files).lock().unwrap(), plan, 1, &mut false).unwrap();
    files.bytes()
}

fn files_in_checkpoints(files: &FaultyFiles) -> Vec<String> {
    Files::of(std::sync::Arc::new(files.clone())).list(Path::new("/run/checkpoints")).unwrap()
}

#[test]
fn save_space_is_within_64_kib_of_saved_bytes() {
    for world in 1..6 {
        let plan = plan(world);
        let (space, saved) = (SaveSpace::new(&plan).unwrap().bytes(), saved_bytes(&plan) as u64);
        // Except for the space for the state of a run.
        assert!((saved..=saved + (64 << 10)).contains(&space), "{world} ranks: {space} for {saved}");
    }
}

#[test]
fn reserved_save_succeeds_on_full_disk() {
    for world in [1, 4] {
        let plan = plan(world);
        let start = FaultyFiles::new();
        let before = start.bytes();
        let lock = run_dir(&start).lock().unwrap();
        let attempt = lock.attempt();
        lock.reserve(&SaveSpace::new(&plan).unwrap()).unwrap();
        drop(lock);
        // From here on not a single byte is free.
        let full = start.with(Fault::FullAt(start.bytes()));
        save(&run_dir(&full).lock_as(attempt).unwrap(), &plan, 1, &mut false).unwrap();
        check(&full, &plan, 1);
        // Space that is not reserved is taken by others.
        run_dir(&start).lock().unwrap().remove_leftovers().unwrap();
        let full = start.with(Fault::FullAt(before + 1));
        save(&run_dir(&full).lock().unwrap(), &plan, 1, &mut false).unwrap_err();
    }
}

#[test]
fn insufficient_space_is_reported_before_writing() {
    let plan = plan(3);
    let space = SaveSpace::new(&plan).unwrap();
    let start = FaultyFiles::new();
    drop(run_dir(&start).lock().unwrap());
    for room in [0, 1, space.bytes() / 2, space.bytes() - 1] {
        let files = start.with(Fault::FullAt(start.bytes() + room as usize));
        let lock = run_dir(&files).lock().unwrap();
        let error = lock.reserve(&space).unwrap_err();
        let expected = format!("a save needs {} bytes, but the disk has {room} left", space.bytes());
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(files_in_checkpoints(&files).is_empty(), "nothing stays set aside");
    }
    let files = start.with(Fault::FullAt(start.bytes() + space.bytes() as usize));
    let lock = run_dir(&files).lock().unwrap();
    lock.reserve(&space).unwrap();
    assert_eq!(files_in_checkpoints(&files).len(), 3);
    lock.reserve(&space).unwrap();
    lock.remove_leftovers().unwrap();
    assert!(files_in_checkpoints(&files).is_empty());
}

#[test]
fn insufficient_space_is_reported_before_clearing() {
    let plan = plan(3);
    let space = SaveSpace::new(&plan).unwrap();
    let start = FaultyFiles::new();
    save(&run_dir(&start).lock().unwrap(), &plan, 1, &mut false).unwrap();
    let freed = saved_bytes(&plan) as u64;
    let needed = space.bytes();
    for (room, fits) in [(0, false), (needed - freed - 1, false), (needed - freed, true)] {
        let files = start.with(Fault::FullAt(start.bytes() + room as usize));
        let lock = run_dir(&files).lock().unwrap();
        assert_eq!(lock.expect_room_after_clearing(&space).is_ok(), fits, "room for {room} bytes");
        check(&files, &plan, 1);
        if fits {
            lock.clear().unwrap();
            lock.remove_cleared().unwrap();
            lock.reserve(&space).unwrap();
        }
    }
}

#[test]
fn set_aside_checkpoint_is_unlisted_and_sound() {
    let (files, plan) = (FaultyFiles::new(), plan(2));
    let lock = run_dir(&files).lock().unwrap();
    for round in 0..2 {
        save(&lock, &plan, 1, &mut false).unwrap();
        let aside = lock.set_aside(1, "diverged").unwrap().unwrap();
        assert_eq!(aside, Path::new("/run/checkpoints/step-00000001.diverged"), "round {round}");
        assert_eq!(lock.run().newest().unwrap(), None);
        open(&files, &aside).unwrap().verify().unwrap();
    }
    assert_eq!(lock.set_aside(1, "diverged").unwrap(), None);
    lock.remove_leftovers().unwrap();
    assert_eq!(files_in_checkpoints(&files), ["step-00000001.diverged"]);
}
