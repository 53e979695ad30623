use proptest::prelude::*;

use super::*;

/// State names of the reference table.
const PARAM_TABLE: [(&str, &str, &str); 6] = [
    ("sharded", "gather", "gathering"),
    ("sharded", "upload", "staged"),
    ("staged", "gather what was uploaded", "gathering"),
    ("gathering", "arrive", "unsharded"),
    ("unsharded", "use", "unsharded"),
    ("unsharded", "reshard", "sharded"),
];

const GRADIENT_TABLE: [(&str, &str, &str); 10] = [
    ("without gradient", "open gradient", "accumulating its gradient"),
    ("holding summed gradients", "open gradient", "accumulating its gradient"),
    ("accumulating its gradient", "close gradient", "holding a complete gradient"),
    ("holding a complete gradient", "fold", "holding summed gradients"),
    ("holding summed gradients", "take the total", "holding a complete gradient"),
    ("holding a complete gradient", "reduce", "reducing its gradient"),
    ("reducing its gradient", "arrive", "holding summed gradients"),
    ("holding summed gradients", "apply", "without gradient"),
    ("holding summed gradients", "download", "holding summed gradients on the host"),
    ("holding summed gradients on the host", "apply", "without gradient"),
];

const PARAM_EVENTS: [&str; 6] = ["gather", "upload", "gather what was uploaded", "arrive", "use", "reshard"];
const GRADIENT_EVENTS: [&str; 8] =
    ["open gradient", "close gradient", "fold", "take the total", "reduce", "arrive", "download", "apply"];

fn next(table: &[(&str, &str, &'static str)], state: &str, event: &str) -> Option<&'static str> {
    table.iter().find(|(from, on, _)| *from == state && *on == event).map(|(_, _, to)| *to)
}

fn slot_of_params(state: &ParamState<u32>) -> Option<usize> {
    match state {
        ParamState::Sharded => None,
        ParamState::Staged { staging } => Some(*staging),
        ParamState::Gathering { slot } | ParamState::Unsharded { slot, .. } => Some(*slot),
    }
}

/// What an event gives back: a slot, buffers.
type Given = (Option<usize>, Option<u32>);

fn fire_params(state: &mut ParamState<u32>, event: &str, slot: usize, value: u32) -> Result<Given, Error> {
    Ok(match event {
        "gather" => state.gather("u", slot).map(|()| (None, None))?,
        "upload" => state.upload("u", slot).map(|()| (None, None))?,
        // Whatever it was uploaded into; another slot is tried beside.
        "gather what was uploaded" => {
            let staging = slot_of_params(state).unwrap_or(0);
            assert!(state.clone().gather_staged("u", staging + 1, slot).is_err());
            state.gather_staged("u", staging, slot).map(|()| (None, None))?
        }
        "arrive" => state.arrive("u", value).map(|()| (None, None))?,
        "use" => (None, Some(*state.unsharded("u")?)),
        "reshard" => state.reshard("u").map(|(slot, buffers)| (Some(slot), Some(buffers)))?,
        _ => unreachable!("events are listed"),
    })
}

fn slot_of_gradient(state: &GradientState<u32>) -> Option<usize> {
    match state {
        GradientState::Empty | GradientState::Summed | GradientState::OnHost => None,
        GradientState::Accumulating { slot }
        | GradientState::Reducing { slot }
        | GradientState::Closed { slot, .. } => Some(*slot),
    }
}

fn fire_gradient(
    state: &mut GradientState<u32>,
    event: &str,
    slot: usize,
    value: u32,
) -> Result<Given, Error> {
    let nothing = |()| (None, None);
    Ok(match event {
        "open gradient" => state.open("u", slot).map(nothing)?,
        "close gradient" => state.close("u", value).map(nothing)?,
        "fold" => state.fold("u").map(|(slot, buffers)| (Some(slot), Some(buffers)))?,
        "take the total" => state.total("u", slot, value).map(nothing)?,
        "reduce" => (None, Some(state.reduce("u")?)),
        "arrive" => (Some(state.arrive("u")?), None),
        "download" => state.download("u").map(nothing)?,
        "apply" => state.apply("u").map(nothing)?,
        _ => unreachable!("events are listed"),
    })
}

fn assert_illegal(error: &Error, state: &str, event: &str) {
    assert_eq!(error.to_string(), format!("unit `u` is {state}: {event} is not possible now"));
}

/// The slow model: the name of the state, the slot and the buffers that are in it.
struct Reference {
    state: &'static str,
    slot: Option<usize>,
    buffers: Option<u32>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn parameters_follow_the_table(
        events in prop::collection::vec((prop::sample::select(PARAM_EVENTS.to_vec()), 0usize..5, any::<u32>()), 0..60),
    ) {
        let mut state = ParamState::default();
        let mut reference = Reference { state: "sharded", slot: None, buffers: None };
        for (event, slot, value) in events {
            let before = state.clone();
            let outcome = fire_params(&mut state, event, slot, value);
            let Some(to) = next(&PARAM_TABLE, reference.state, event) else {
                assert_illegal(&outcome.unwrap_err(), reference.state, event);
                prop_assert_eq!(&state, &before);
                continue;
            };
            let expected = match event {
                "gather" | "upload" | "gather what was uploaded" => { reference.slot = Some(slot); (None, None) }
                "arrive" => { reference.buffers = Some(value); (None, None) }
                "use" => (None, reference.buffers),
                _ => (reference.slot.take(), reference.buffers.take()),
            };
            prop_assert_eq!(outcome.unwrap(), expected);
            reference.state = to;
            prop_assert_eq!(state.name(), to);
            prop_assert_eq!(slot_of_params(&state), reference.slot);
        }
    }

    #[test]
    fn gradients_follow_the_table(
        events in prop::collection::vec((prop::sample::select(GRADIENT_EVENTS.to_vec()), 0usize..5, any::<u32>()), 0..80),
    ) {
        let mut state = GradientState::default();
        let mut reference = Reference { state: "without gradient", slot: None, buffers: None };
        for (event, slot, value) in events {
            let before = state.clone();
            let outcome = fire_gradient(&mut state, event, slot, value);
            let Some(to) = next(&GRADIENT_TABLE, reference.state, event) else {
                assert_illegal(&outcome.unwrap_err(), reference.state, event);
                prop_assert_eq!(&state, &before);
                continue;
            };
            let expected = match event {
                "open gradient" => { reference.slot = Some(slot); (None, None) }
                "close gradient" => { reference.buffers = Some(value); (None, None) }
                "reduce" => (None, reference.buffers.take()),
                "fold" => (reference.slot.take(), reference.buffers.take()),
                "take the total" => {
                    (reference.slot, reference.buffers) = (Some(slot), Some(value));
                    (None, None)
                }
                "arrive" => (reference.slot.take(), None),
                _ => (None, None),
            };
            prop_assert_eq!(outcome.unwrap(), expected);
            reference.state = to;
            prop_assert_eq!(state.name(), to);
            prop_assert_eq!(slot_of_gradient(&state), reference.slot);
        }
    }
}

/// Every state that some events reach, from every other one.
#[test]
fn every_state_answers_every_event() {
    let sequences: [&[&str]; 6] = [
        &[],
        &["open gradient"],
        &["open gradient", "close gradient"],
        &["open gradient", "close gradient", "reduce"],
        &["open gradient", "close gradient", "fold"],
        &["open gradient", "close gradient", "fold", "download"],
    ];
    let mut legal = 0;
    for events in sequences {
        let mut state = GradientState::default();
        for event in events {
            fire_gradient(&mut state, event, 3, 7).unwrap();
        }
        for event in GRADIENT_EVENTS {
            let (mut after, from) = (state.clone(), state.name());
            match (fire_gradient(&mut after, event, 4, 8), next(&GRADIENT_TABLE, from, event)) {
                (Ok(_), Some(to)) => assert_eq!(after.name(), to),
                (Err(error), None) => assert_illegal(&error, from, event),
                (outcome, expected) => panic!("{from} on {event}: {outcome:?}, expected {expected:?}"),
            }
            legal += usize::from(next(&GRADIENT_TABLE, from, event).is_some());
        }
    }
    assert_eq!(legal, GRADIENT_TABLE.len());
}
