use std::thread;

use super::*;

const LIMIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

#[test]
fn collect_returns_values_in_rank_order_only_once() {
    let assembly = InMemoryAssembly::new(4);
    thread::scope(|scope| {
        for rank in (0..4).rev() {
            let assembly = &assembly;
            scope.spawn(move || assembly.give("save 0", Rank(rank), vec![rank as u8; rank]).unwrap());
        }
        let expected: Vec<_> = (0..4).map(|rank| vec![rank as u8; rank]).collect();
        assert_eq!(assembly.collect("save 0", 4, LIMIT).unwrap(), expected);
    });
    assert_eq!(assembly.given("save 0"), 0);
    assert_eq!(assembly.given("save 1"), 0);
}

#[test]
fn late_ranks_are_named_in_error() {
    let assembly = InMemoryAssembly::new(3);
    assembly.give("topic", Rank(1), Vec::new()).unwrap();
    let error = assembly.collect("topic", 3, SHORT).unwrap_err();
    assert_eq!(error, AssemblyError::Late { ranks: vec![Rank(0), Rank(2)], limit: SHORT });
    assert_eq!(assembly.given("topic"), 1, "what was given is kept");
    let error = assembly.hear("topic", SHORT).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 sent nothing within 0.02 s");
}

#[test]
fn first_announcement_is_heard_by_all_and_kept() {
    let assembly = InMemoryAssembly::new(2);
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..2).map(|_| scope.spawn(|| assembly.hear("start", LIMIT).unwrap())).collect();
        assembly.announce("start", vec![7]).unwrap();
        assembly.announce("start", vec![8]).unwrap();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap() == [7]));
    });
    assert_eq!(assembly.hear("start", SHORT).unwrap(), [7]);
}

#[test]
fn give_up_ends_wait_but_complete_topic_is_still_collected() {
    let assembly = InMemoryAssembly::new(2);
    assembly.give("whole", Rank(0), Vec::new()).unwrap();
    assembly.give("whole", Rank(1), Vec::new()).unwrap();
    assembly.give("half", Rank(0), Vec::new()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| assembly.collect("half", 2, LIMIT));
        assembly.give_up("half");
        assembly.give_up("whole");
        assert_eq!(waiting.join().unwrap().unwrap_err(), AssemblyError::GivenUp);
    });
    assert_eq!(assembly.collect("whole", 2, LIMIT).unwrap().len(), 2);
}

#[test]
fn collect_fails_for_lost_rank_unless_it_already_gave() {
    let topics = TopicStore::default();
    topics.give("before", Rank(1), vec![1]);
    let error = CommError::PeerFailed { rank: Rank(1), reason: "it was killed".to_owned() };
    topics.lose(Rank(1), error.clone());
    assert_eq!(topics.collect("after", 2, LIMIT).unwrap_err(), AssemblyError::Failed(error));
    topics.give("before", Rank(0), vec![0]);
    assert_eq!(topics.collect("before", 2, LIMIT).unwrap(), [[0], [1]]);
}
