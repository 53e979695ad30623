//! Compares programs with and without loops, run by a CPU plugin (`FSDP_TEST_PJRT` is the path of its library).

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;
use crate::ffi::{Client, CompileOptions, Plugin};
use crate::hlo::Element;

/// Elements of every value.
const WIDTH: usize = 6;

/// Operations per round, apart from those that keep numbers small.
const STEPS: usize = 10;

/// The source of an operand.
#[derive(Clone, Copy, Debug)]
enum From {
    /// An earlier operation of the round, or an argument if there is none.
    Own(usize),
    /// An operation `.0` rounds before, or an argument if there was none.
    Before(usize, usize),
    /// An argument shared by all rounds.
    Outside(usize),
    /// An argument of this round only.
    Each(usize),
}

/// Rounds of operations, and those of their results that are read afterwards.
#[derive(Clone, Debug)]
struct Rounds {
    steps: Vec<(bool, From, From)>,
    /// For each result that is kept: how many rounds before the last, and its step.
    kept: Vec<(usize, usize)>,
}

fn rounds() -> impl Strategy<Value = Rounds> {
    let from = prop_oneof![
        3 => (0..STEPS).prop_map(From::Own),
        2 => (1..4_usize, 0..STEPS).prop_map(|(distance, step)| From::Before(distance, step)),
        1 => (0..2_usize).prop_map(From::Outside),
        2 => (0..2_usize).prop_map(From::Each),
    ];
    let steps = prop::collection::vec((any::<bool>(), from.clone(), from), STEPS);
    let kept = prop::collection::vec((0..3_usize, 0..STEPS), 0..4);
    (steps, kept).prop_map(|(steps, kept)| Rounds { steps, kept })
}

/// Traces the rounds; `each` has the arguments of every round.
fn written(hlo: &mut Builder, rounds: &Rounds, outside: &[Value], each: &[[Value; 2]]) -> Vec<Vec<Value>> {
    let mut all: Vec<Vec<Value>> = Vec::new();
    for (round, each) in each.iter().enumerate() {
        let mut own: Vec<Value> = Vec::new();
        for &(adds, left, right) in &rounds.steps {
            let operand = |from| match from {
                From::Own(step) if own.is_empty() => outside[step % 2].clone(),
                From::Own(step) => own[step % own.len()].clone(),
                From::Before(distance, step) if distance <= round => all[round - distance][step].clone(),
                From::Before(_, number) | From::Outside(number) => outside[number % 2].clone(),
                From::Each(number) => each[number].clone(),
            };
            let (left, right) = (operand(left), operand(right));
            let made = if adds { hlo.add(&left, &right) } else { hlo.subtract(&left, &right) };
            // Reshape to two dimensions and back, as with buffers.
            let wide = hlo.reshape(&made, &[2, WIDTH / 2]);
            let small = hlo.with("minimum", &wide, 9.0);
            let small = hlo.with("maximum", &small, -9.0);
            own.push(hlo.reshape(&small, &[WIDTH]));
        }
        let wide = hlo.reshape(&own[STEPS - 1], &[2, WIDTH / 2]);
        let product = hlo.matmul(&wide, &wide, [1, 1], Element::F32);
        let sum = hlo.sum(&product, &[0, 1]);
        let all_of_it = hlo.fill(&sum, &[WIDTH]);
        own[STEPS - 1] = hlo.with("minimum", &all_of_it, 5.0);
        // Operations with several results, and with nested operations.
        let both = hlo.barrier(&[own[0].clone(), own[1].clone()]);
        own[..2].clone_from_slice(&both);
        let open = hlo.begin_loop(3, &both);
        let [first, second] = [0, 1].map(|part| open.values()[part].clone());
        let less = hlo.subtract(&second, &own[2]);
        let small = hlo.with("minimum", &less, 7.0);
        let ends = [hlo.with("maximum", &small, -7.0), first];
        own[3] = hlo.end_loop(open, &ends).swap_remove(1);
        all.push(own);
    }
    all
}

/// Traces updates of the first argument of every round, one after the other; returns the new values. They read the
/// gradients through a barrier, as updates of buffers do.
fn updates(hlo: &mut Builder, each: &[[Value; 2]], gradients: &[Value]) -> Vec<Value> {
    let mut last = gradients[0].clone();
    let update = |(each, gradient): (&[Value; 2], &Value)| {
        let gradient = hlo.after(gradient, &last);
        let param = hlo.after(&each[0], &last);
        let mut new = param;
        for factor in 0..6 {
            let change = hlo.with("multiply", &gradient, 0.5);
            let away = hlo.with("add", &new, f64::from(factor));
            new = hlo.subtract(&away, &change);
        }
        let small = hlo.with("minimum", &new, 8.0);
        last = hlo.with("maximum", &small, -8.0);
        last.clone()
    };
    each.iter().zip(gradients).map(update).collect()
}

/// Traces two runs, the second over the results of the first, from its last round to its first. The whole is repeated,
/// each time starting with the last results of the time before. In the end the arguments of all rounds are updated.
fn module(counts: [usize; 2], first: &Rounds, second: &Rounds, updated: usize) -> Module {
    let shape = Shape::new(&[WIDTH], Element::F32);
    let argument = |number| Value { name: Name::Argument(number), shape: shape.clone() };
    let mut outside = [argument(0), argument(1)];
    let each: Vec<[Value; 2]> =
        (0..counts[0]).map(|round| [argument(2 + 2 * round), argument(3 + 2 * round)]).collect();
    let mut hlo = Builder::default();
    let (mut results, mut gradients) = (Vec::new(), Vec::new());
    for _ in 0..counts[1] {
        let made = written(&mut hlo, first, &outside, &each);
        let back: Vec<[Value; 2]> =
            made.iter().zip(&each).rev().map(|(own, each)| [own[0].clone(), each[1].clone()]).collect();
        let again = written(&mut hlo, second, &outside, &back);
        let kept = |rounds: &Rounds, all: &[Vec<Value>]| -> Vec<Value> {
            rounds.kept.iter().map(|&(round, step)| all[all.len() - 1 - round][step].clone()).collect()
        };
        outside[0] = again[counts[0] - 1][STEPS - 1].clone();
        results = [vec![outside[0].clone()], kept(first, &made), kept(second, &again)].concat();
        gradients = again.iter().rev().map(|own| own[1].clone()).collect();
    }
    // The ends of a schedule's passes are in no loop.
    gradients[0] = outside[1].clone();
    let new = updates(&mut hlo, &each[..updated], &gradients);
    let arguments = vec![shape; 2 + 2 * counts[0]];
    let mut aliases = vec![None; arguments.len()];
    for (round, value) in new.into_iter().enumerate() {
        aliases[2 + 2 * round] = Some(results.len());
        results.push(value);
    }
    results.extend_from_slice(&gradients);
    let signature = Signature { arguments, results, aliases };
    Module { hlo, signature, stacked: Stacked::default(), replicas: 1 }
}

/// The bits of all results, in the order of the traced ones, with small numbers as arguments.
fn run(client: &Arc<Client>, module: &Module) -> Vec<Vec<u8>> {
    let options = CompileOptions { devices: vec![0], flags: Vec::new() };
    let executable = client.compile(&module.text(), &options).unwrap();
    let Interface { inputs, outputs } = module.interface();
    let bytes = |member: usize| {
        let number = move |at: usize| ((member * 7 + at * 3) % 11) as f32 - 5.0;
        (0..WIDTH).flat_map(move |at| number(at).to_le_bytes())
    };
    let upload = |Input { shape, members }: &Input| {
        let bytes: Vec<u8> = members.iter().flat_map(|&member| bytes(member)).collect();
        Arc::new(client.upload(0, shape, &bytes).unwrap())
    };
    let arguments = inputs.iter().map(upload).collect();
    let made = executable.execute(&[arguments]).unwrap().swap_remove(0);
    assert_eq!(made.len(), outputs.len());
    let mut results = vec![Vec::new(); module.signature.results.len()];
    for (buffer, Output { kind, .. }) in made.iter().zip(outputs) {
        let owners: Vec<Option<usize>> = match kind {
            OutputKind::Results(own) => own.into_iter().map(Some).collect(),
            OutputKind::Arguments(input) => {
                inputs[input].members.iter().map(|&member| module.signature.aliases[member]).collect()
            }
        };
        let mut whole = vec![0; owners.len() * 4 * WIDTH];
        buffer.download(&mut whole).unwrap();
        for (owner, own) in owners.iter().zip(whole.chunks(4 * WIDTH)) {
            if let Some(owner) = *owner {
                results[owner] = own.to_vec();
            }
        }
    }
    results
}

/// Arguments that are stored together: none, the first ones of all rounds, in order or not, or those of some.
fn together(rounds: usize, choice: u8) -> Vec<Vec<usize>> {
    let first = |round: usize| 2 + 2 * round;
    match choice {
        0 => Vec::new(),
        1 => vec![(0..rounds).map(first).collect()],
        2 => {
            vec![(0..rounds).rev().map(first).collect(), (0..rounds).map(|round| first(round) + 1).collect()]
        }
        3 => vec![(1..rounds).map(first).collect()],
        _ => vec![(0..rounds).step_by(2).map(first).collect()],
    }
}

#[test]
fn scanned_programs_compute_same_results() {
    let Some(path) = std::env::var_os("FSDP_TEST_PJRT") else {
        return println!("skipped: this test needs a PJRT plugin for processors, named by FSDP_TEST_PJRT");
    };
    let plugin = Arc::new(Plugin::open(Path::new(&path)).unwrap());
    let client = Arc::new(Client::new(plugin, Vec::new()).unwrap());
    let [loops, stacks, returned] = [const { Cell::new(0) }; 3];
    let cases = 40;
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let inputs = (
        4..9_usize,
        prop_oneof![Just(1), Just(5)],
        rounds(),
        rounds(),
        prop_oneof![3..9_usize, Just(9)],
        0..5_u8,
    );
    let outcome = TestRunner::new(config).run(&inputs, |(rounds, times, first, second, updated, stored)| {
        let module = module([rounds, times], &first, &second, updated.min(rounds));
        let scanned = module.scanned(&together(rounds, stored), false);
        loops.set(loops.get() + u32::from(scanned.is_some()));
        let scanned = scanned.unwrap_or_else(|| module.clone());
        let is_changed = |stack: &ArgumentStack| stack.result.is_some();
        returned.set(returned.get() + u32::from(!scanned.stacked.results.is_empty()));
        stacks.set(stacks.get() + u32::from(scanned.stacked.arguments.iter().any(is_changed)));
        prop_assert_eq!(run(&client, &module), run(&client, &scanned));
        // What is stored together after a step stays so.
        let stored: Vec<Vec<usize>> =
            scanned.stacked.arguments.iter().map(|stack| stack.members.clone()).collect();
        let again = module.scanned(&stored, false).map(|again| again.text());
        prop_assert_eq!(again.unwrap_or_else(|| module.text()), scanned.text());
        Ok(())
    });
    outcome.unwrap();
    assert!(loops.get() > cases * 3 / 4, "most runs become loops: {} of {cases}", loops.get());
    assert!(returned.get() > cases / 8, "results become stacks: {} of {cases}", returned.get());
    assert!(stacks.get() > cases / 2, "most arguments become stacks: {} of {cases}", stacks.get());
}
