use super::*;

#[test]
fn failure_blames_rank_named_by_error() {
    let reason = || "it is gone".to_owned();
    let ranks = vec![Rank(4), Rank(5)];
    let differs = CommError::Differs { ranks, reference: Rank(0) };
    let cases = [
        (CommError::PeerFailed { rank: Rank(3), reason: reason() }, 3, reason(), FailureKind::Temporary),
        (CommError::Transport { rank: Rank(2), reason: reason() }, 2, reason(), FailureKind::Temporary),
        (differs.clone(), 4, differs.to_string(), FailureKind::Permanent),
    ];
    for (error, rank, cause, kind) in cases {
        let failure = Failure { rank: Some(Rank(rank)), cause, kind, last_call: None };
        assert_eq!(Failure::from(&error), failure);
    }
}

#[test]
fn roster_maps_ranks_to_processes() {
    let facts = Facts {
        host: String::new(),
        pid: 0,
        addresses: Vec::new(),
        cpu_model: String::new(),
        device: String::new(),
    };
    let entry = |ranks| ProcessEntry { ranks, facts: facts.clone() };
    let roster = Roster { generation: 1, processes: vec![entry(0..2), entry(2..3)] };
    let found: Vec<_> = (0..4).map(|rank| roster.process_of(Rank(rank))).collect();
    assert_eq!((found, roster.world()), (vec![Some(0), Some(0), Some(1), None], 3));
}
