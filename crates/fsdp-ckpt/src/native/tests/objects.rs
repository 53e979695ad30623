//! Saves to an object store: failures of every request, runs that race, and attempts that should be dead.

use std::num::NonZeroUsize;

use super::*;
use crate::{
    file_io::Files,
    files::object::testing::{
        FaultyStore, StoreFails,
        server::{Bad, Content, Server},
    },
    native::attempt::plain_name,
};

const OUT_DIR: &str = "memory:///bucket/run";

fn run_of(store: &FaultyStore) -> RunDir {
    RunDir::on(store.files(), OUT_DIR.into())
}

/// A plan with files of several upload parts: each row is longer than one part.
fn long_plan(world: usize) -> SavePlan {
    let tensors =
        vec![tensor("w", TensorType::F32, &[9, 200], world), tensor("step", TensorType::I64, &[], world)];
    SavePlan::new(world, tensors).unwrap()
}

/// Makes a checkpoint of step 1 and an interrupted save of step 2.
fn prepare(files: Files, plan: &SavePlan) {
    let lock = RunDir::on(files, OUT_DIR.into()).lock().unwrap();
    save(&lock, plan, 1, &mut false).unwrap();
    let _ = save_parts(&lock, plan, 2).unwrap();
}

fn before(plan: &SavePlan) -> FaultyStore {
    let store = FaultyStore::new();
    prepare(store.files(), plan);
    store
}

/// The work of a process: saves step 2, keeps one checkpoint and removes the files of other attempts.
fn work(files: Files, plan: &SavePlan) -> (bool, Result<(), Error>) {
    let mut is_committed = false;
    let ended = (|| {
        let lock = RunDir::on(files, OUT_DIR.into()).lock()?;
        save(&lock, plan, 2, &mut is_committed)?;
        lock.keep_last(NonZeroUsize::MIN, u64::MAX, &[])?;
        lock.remove_other_attempts()
    })();
    (is_committed, ended)
}

/// Checks that every checkpoint that looks complete is complete, and that saving works.
fn check_restart(files: &Files, plan: &SavePlan, is_committed: bool) {
    let run = RunDir::on(files.clone(), OUT_DIR.into());
    let (newest, _) = run.newest().unwrap().unwrap();
    assert!(newest == 2 || (newest == 1 && !is_committed), "step {newest} is the newest");
    run.steps().unwrap().into_iter().for_each(|step| check_in(&run, plan, step));
    let lock = run.lock().unwrap();
    save(&lock, plan, 3, &mut false).unwrap();
    lock.keep_last(NonZeroUsize::MIN, u64::MAX, &[]).unwrap();
    lock.remove_other_attempts().unwrap();
    check_in(&run, plan, 3);
    let names = files.list(run.checkpoints()).unwrap();
    assert_eq!(names, ["step-00000003"]);
    assert_eq!(files.list(&run.checkpoint(3)).unwrap().len(), 2, "a manifest and an attempt");
}

fn survives(plan: &SavePlan, fails: fn(u64) -> StoreFails) -> usize {
    let start = before(plan);
    let whole = start.with(StoreFails::Never);
    work(whole.files(), plan).1.unwrap();
    assert!(whole.requests() > 10);
    let mut tolerated = 0;
    for at in 0..whole.requests() {
        let store = start.with(fails(at));
        let (is_committed, ended) = work(store.files(), plan);
        if let Err(error) = &ended {
            assert!(error.to_string().contains("made to fail"), "request {at}: {error}");
        }
        tolerated += usize::from(ended.is_ok());
        check_restart(&store.again().files(), plan, is_committed);
    }
    tolerated
}

#[test]
fn every_failed_request_is_detected_and_survived() {
    for plan in [plan(1), plan(4), long_plan(2)] {
        assert_eq!(survives(&plan, StoreFails::At), 0);
        assert_eq!(survives(&plan, StoreFails::From), 0);
    }
}

#[test]
fn every_lost_response_is_survived() {
    // The answer for the manifest, and the answer for the end of each multipart file.
    assert_eq!(survives(&plan(1), StoreFails::AnswerAt), 1);
    assert_eq!(survives(&plan(4), StoreFails::AnswerAt), 1);
    assert_eq!(survives(&long_plan(2), StoreFails::AnswerAt), 3);
    for plan in [plan(1), plan(4), long_plan(2)] {
        assert_eq!(survives(&plan, StoreFails::AfterAnswer), 0);
    }
}

/// A server with a checkpoint and an interrupted save, what it holds, and the number of requests of the next save.
fn served(plan: &SavePlan) -> (Server, Content, u64) {
    let server = Server::start();
    prepare(server.files(), plan);
    let start = server.content();
    server.plan(&start, None, 0, 0);
    work(server.files(), plan).1.unwrap();
    let requests = server.requests();
    (server, start, requests)
}

#[test]
fn bad_answers_during_save_and_cleanup_are_survived() {
    let plan = long_plan(2);
    let (server, start, requests) = served(&plan);
    assert!(requests > 20, "{requests}");
    for at in 0..requests {
        for (index, bad) in Bad::ALL.into_iter().enumerate() {
            server.plan(&start, Some(bad), at, 1 + (at + index as u64) % 9);
            let (_, ended) = work(server.files(), &plan);
            ended.unwrap_or_else(|error| panic!("{bad:?} at {at}: {error}"));
            // The checkpoint is whole, and all else is gone.
            server.plan(&server.content(), None, 0, 0);
            let files = server.files();
            let run = RunDir::on(files.clone(), OUT_DIR.into());
            assert_eq!(run.steps().unwrap(), [2], "{bad:?} at {at}");
            check_in(&run, &plan, 2);
            assert_eq!(files.list(&run.checkpoint(2)).unwrap().len(), 2, "{bad:?} at {at}");
        }
    }
    check_restart(&server.files(), &plan, true);
}

#[test]
fn bad_answers_for_ever_leave_whole_checkpoints() {
    let plan = long_plan(2);
    let (server, start, requests) = served(&plan);
    for at in (0..requests).step_by(3) {
        for bad in [Bad::Reset, Bad::Lost, Bad::Status(503, "SlowDown")] {
            server.plan(&start, Some(bad), at, u64::MAX);
            let (is_committed, ended) = work(server.files(), &plan);
            let error = ended.unwrap_err().to_string();
            assert!(error.contains("tried 11 times"), "{bad:?} at {at}: {error}");
            server.plan(&server.content(), None, 0, 0);
            check_restart(&server.files(), &plan, is_committed);
        }
    }
}

fn state(step: u64) -> Map<String, serde_json::Value> {
    json!({ "step": step }).as_object().cloned().unwrap()
}

#[test]
fn second_save_of_step_succeeds_only_with_same_content() {
    let (store, plan) = (FaultyStore::new(), long_plan(2));
    let [one, same, other] = [(); 3].map(|()| run_of(&store.again()).lock().unwrap());
    let [first, second, third] = [&one, &same, &other].map(|lock| save_parts(lock, &plan, 7).unwrap());
    one.commit(&plan, 7, state(7), first).unwrap();
    same.commit(&plan, 7, state(7), second).unwrap();
    let error = other.commit(&plan, 7, state(8), third).unwrap_err();
    assert!(
        matches!(&error, Error::WrongPath { reason, .. } if reason.contains("two runs write here")),
        "{error}"
    );
    other.discard(7).unwrap();
    check_in(one.run(), &plan, 7);
    let names = store.files().list(&one.run().checkpoint(7)).unwrap();
    assert_eq!(names, [one.attempt().to_string(), "manifest.json".to_owned()]);
}

#[test]
fn dropped_part_is_removed_and_can_be_rewritten() {
    let (store, plan) = (FaultyStore::new(), long_plan(1));
    let lock = run_of(&store).lock().unwrap();
    let create = || RankSave::create(lock.run(), lock.attempt(), &plan, 7, 0);
    let part = create().unwrap();
    assert!(matches!(create(), Err(Error::Io { .. })), "one at a time");
    drop(part);
    drop(create().unwrap());
    save(&lock, &plan, 7, &mut false).unwrap();
    check_in(lock.run(), &plan, 7);
}

#[test]
fn zombie_attempt_does_not_damage_other_saves() {
    let (store, plan) = (FaultyStore::new(), long_plan(2));
    let [zombie, lock] = [(); 2].map(|()| run_of(&store.again()).lock().unwrap());
    let late = save_parts(&zombie, &plan, 7).unwrap();
    save(&lock, &plan, 7, &mut false).unwrap();
    save(&lock, &plan, 8, &mut false).unwrap();
    // The late attempt publishes a step that is already saved and one that is not; both are complete.
    zombie.commit(&plan, 7, state(7), late).unwrap();
    save(&zombie, &plan, 9, &mut false).unwrap();
    assert_eq!(lock.run().steps().unwrap(), [7, 8, 9]);
    [7, 8, 9].into_iter().for_each(|step| check_in(lock.run(), &plan, step));
    let error = RankSave::create(lock.run(), lock.attempt(), &plan, 9, 0).unwrap_err();
    assert!(
        matches!(&error, Error::WrongPath { reason, .. } if reason.contains("never overwritten")),
        "{error}"
    );
}

#[test]
fn interrupted_clearing_leaves_all_checkpoints_or_none() {
    let plan = plan(2);
    let start = FaultyStore::new();
    let lock = run_of(&start).lock().unwrap();
    (1..=3).for_each(|step| save(&lock, &plan, step, &mut false).unwrap());
    let clear = |lock: &RunLock| {
        lock.clear()?;
        lock.remove_cleared()
    };
    let whole = start.with(StoreFails::Never);
    clear(&run_of(&whole).lock().unwrap()).unwrap();
    for at in 0..whole.requests() {
        let store = start.with(StoreFails::From(at));
        clear(&run_of(&store).lock().unwrap()).unwrap_err();
        let run = run_of(&store.again());
        let steps = run.steps().unwrap();
        assert!(steps == [1, 2, 3] || steps.is_empty(), "request {at}: {steps:?}");
        steps.iter().for_each(|&step| check_in(&run, &plan, step));
        let lock = run.lock().unwrap();
        clear(&lock).unwrap();
        assert!(!lock.is_clearing().unwrap());
        save(&lock, &plan, 1, &mut false).unwrap();
        assert_eq!(run.steps().unwrap(), [1]);
        check_in(&run, &plan, 1);
    }
}

#[test]
fn set_aside_checkpoint_returns_when_manifest_is_restored() {
    let (store, plan) = (FaultyStore::new(), plan(2));
    let lock = run_of(&store).lock().unwrap();
    save(&lock, &plan, 1, &mut false).unwrap();
    let aside = lock.set_aside(1, "diverged").unwrap().unwrap();
    assert_eq!(aside, lock.run().checkpoint(1).join("manifest.diverged.json"));
    assert_eq!(lock.run().newest().unwrap(), None);
    lock.remove_other_attempts().unwrap();
    let text = store.files().read_whole(&aside).unwrap();
    store.files().replace(&lock.run().checkpoint(1).join(MANIFEST_FILE), &text).unwrap();
    check_in(lock.run(), &plan, 1);
    assert_eq!(lock.set_aside(2, "diverged").unwrap(), None);
}

#[test]
fn plain_name_strips_only_attempt_directory() {
    assert_eq!(plain_name("0123456789abcdef/a.safetensors"), "a.safetensors");
    for name in ["a.safetensors", "other/a.safetensors", "0123456789ABCDEF/a.safetensors"] {
        assert_eq!(plain_name(name), name);
    }
}
