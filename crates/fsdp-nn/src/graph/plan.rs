//! Lowers a graph to the lists of calls for one way to run a block.

use fsdp_core::memory::Category;

use super::derive::Backward;
use super::forward::{Forward, at};
use super::list::{Draft, List};
use super::{BlockGraph, Call, Decl, Operand, Trained};
use crate::op::{Experts, Head, HeadDims, LossTerms, Op, RouterTerms};

/// A way to run a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Forward, without keeping values.
    Evaluate,
    /// Forward, keeping the values that backward reads; then backward.
    Record,
    /// Forward, keeping only what [`Route::Recompute`] starts from: the outputs of products, if `products`.
    Checkpoint {
        /// Whether the outputs of linear maps and of attention are kept.
        products: bool,
    },
    /// Second forward, as far as its results are read, keeping the values that backward reads; then backward.
    Recompute {
        /// Whether the first forward kept the outputs of products.
        products: bool,
    },
    /// The last block: forward, head, loss and backward.
    ForwardBackward,
    /// The last block: forward, head and loss.
    Loss,
    /// The last block: forward, and the logits of all rows.
    Logits,
}

/// The requirements of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The way to run the block.
    pub(crate) route: Route,
    /// Whether the block's input has another reader, so that it cannot be overwritten.
    pub(crate) input_shared: bool,
    /// Whether the output of a second forward is read.
    pub(crate) output_read: bool,
}

/// The output head after the last block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadCall {
    pub(crate) dims: HeadDims,
    /// Index of the weight in the block's list of parameters.
    pub(crate) weight: usize,
    pub(crate) trained: bool,
    /// Whether the gradient of the logits has a buffer of its own.
    pub(crate) is_rounded: bool,
    /// What the routers add to the loss of training, if the model has any.
    pub(crate) routers: Option<RouterTerms>,
}

/// A plan for one way to run a block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockPlan {
    /// The declarations of all places.
    pub(crate) places: Vec<Decl>,
    /// The place of the block's input.
    pub(crate) input: Option<usize>,
    /// Values kept by an earlier forward, and their places.
    pub(crate) sources: Vec<(usize, usize)>,
    /// The calls of forward; with a head, also those of the loss and of backward.
    pub(crate) forward: List,
    /// The place of the result: the block's output, or, for the last block, the gradient of its input or the logits.
    pub(crate) output: Option<usize>,
    /// Whether the output has another reader.
    pub(crate) output_shared: bool,
    /// Values that stay live for a second forward or for backward, and their places.
    pub(crate) kept: Vec<(usize, usize)>,
    /// Whether the kept values are outputs of products.
    pub(crate) keeps_products: bool,
    /// Backward, if the output has a gradient.
    pub(crate) backward: Option<BackwardPlan>,
}

/// The backward of a block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackwardPlan {
    /// The calls.
    pub(crate) list: List,
    /// The place of the output's gradient.
    pub(crate) from: usize,
    /// The place of the input's gradient, if the input has one.
    pub(crate) to: Option<usize>,
}

/// Backward before values are assigned to places.
pub(super) struct Derived {
    pub(super) calls: Vec<Call>,
    pub(super) places: Vec<Decl>,
    pub(super) from: usize,
    pub(super) to: Option<usize>,
    /// Values that backward reads.
    reads: Vec<usize>,
}

impl Derived {
    pub(super) fn new(graph: &BlockGraph, trained: &Trained) -> Option<Self> {
        let mut backward = Backward::new(graph, trained);
        if !backward.output_has_gradient() {
            return None;
        }
        let output = Decl { category: Category::Activation, ..graph.values[graph.output] };
        let from = backward.draft.place(output);
        let to = backward.derive(from);
        let Draft { places, calls } = backward.draft;
        let mut reads: Vec<usize> =
            calls.iter().flat_map(Call::locals).filter(|&id| id < graph.values.len()).collect();
        reads.sort_unstable();
        reads.dedup();
        Some(Self { calls, places, from, to, reads })
    }

    /// Adds the calls to a draft, given the places of values and, if known, of the output's gradient. Returns the
    /// places of the output's and the input's gradient.
    fn emit(
        self,
        draft: &mut Draft,
        values: &[Option<usize>],
        from: Option<usize>,
    ) -> (usize, Option<usize>) {
        let mut places = values.to_vec();
        for (id, decl) in self.places.into_iter().enumerate().skip(values.len()) {
            let known = from.filter(|_| id == self.from);
            places.push(Some(known.unwrap_or_else(|| draft.place(decl))));
        }
        let place = |operand: Operand| at(&places, operand);
        draft.calls.extend(self.calls.into_iter().map(|call| Call {
            reads: call.reads.into_iter().map(place).collect(),
            writes: call.writes.into_iter().map(|(operand, add)| (place(operand), add)).collect(),
            ..call
        }));
        let of = |id: usize| places[id].expect("backward has all its places");
        (of(self.from), self.to.map(of))
    }
}

/// Returns the products from which a second forward starts.
fn products(graph: &BlockGraph, reads: &[usize], with_output: bool) -> Vec<usize> {
    let mut pending = reads.to_vec();
    pending.extend(with_output.then_some(graph.output));
    let mut products = Vec::new();
    let mut visited = Vec::new();
    while let Some(value) = pending.pop() {
        if visited.contains(&value) {
            continue;
        }
        visited.push(value);
        match graph.producer(value) {
            Some((_, node)) if node.op().describe().is_product() => products.push(value),
            Some((_, node)) => pending.extend(node.reads()),
            None => {}
        }
    }
    products.sort_unstable();
    products
}

impl BlockPlan {
    pub(crate) fn new(
        graph: &BlockGraph,
        trained: &Trained,
        head: Option<HeadCall>,
        request: Request,
    ) -> Self {
        let route = request.route;
        let has_backward = !matches!(route, Route::Evaluate | Route::Loss | Route::Logits);
        let derived = has_backward.then(|| Derived::new(graph, trained)).flatten();
        let reads = derived.as_ref().map_or_else(Vec::new, |derived| derived.reads.clone());
        let start_values =
            |keeps| if keeps { products(graph, &reads, request.output_read) } else { Vec::new() };
        let (sources, kept) = match route {
            Route::Checkpoint { products } => (Vec::new(), start_values(products)),
            Route::Recompute { products } => (start_values(products), reads.clone()),
            _ => (Vec::new(), reads.clone()),
        };
        let mut draft = Draft::default();
        let mut places = vec![None; graph.values.len()];
        let mut declare = |value: usize| {
            let place = draft.place(Decl { category: Category::Activation, ..graph.values[value] });
            places[value] = Some(place);
            (value, place)
        };
        let input = graph.input.map(|input| declare(input).1);
        let sources: Vec<(usize, usize)> = sources.into_iter().map(declare).collect();
        let with_output = !matches!(route, Route::Recompute { .. }) || request.output_read;
        let forward = Forward { graph, places, kept: &kept, with_output, input_shared: request.input_shared };
        let places = forward.emit(&mut draft);
        let place = |value: usize| places[value].expect("what is kept was computed");
        let before: Vec<usize> = sources.iter().map(|(_, place)| *place).chain(input).collect();
        let kept: Vec<(usize, usize)> = kept.iter().map(|&value| (value, place(value))).collect();
        if let Some(head) = head {
            return Self::with_head(draft, &places, (graph.output, input), head, route, derived);
        }
        let output = with_output.then(|| place(graph.output));
        let mut after: Vec<usize> = kept.iter().map(|(_, place)| *place).collect();
        let output_shared = output
            .is_some_and(|place| after.contains(&place) || (Some(place) == input && request.input_shared));
        let kept_places = after.clone();
        after.extend(output);
        let forward = List::new(std::mem::take(&mut draft.calls), &before, &after);
        let derived = derived.filter(|_| !matches!(route, Route::Checkpoint { .. }));
        let backward = derived.map(|derived| {
            let (from, to) = derived.emit(&mut draft, &places, None);
            let before: Vec<usize> = kept_places.into_iter().chain([from]).collect();
            let after: Vec<usize> = to.into_iter().collect();
            BackwardPlan { list: List::new(std::mem::take(&mut draft.calls), &before, &after), from, to }
        });
        let keeps_products = route == Route::Checkpoint { products: true };
        let places = draft.places;
        Self { places, input, sources, forward, output, output_shared, kept, keeps_products, backward }
    }

    /// The plan of the last block, as a single list.
    fn with_head(
        mut draft: Draft,
        places: &[Option<usize>],
        (output, input): (usize, Option<usize>),
        head: HeadCall,
        route: Route,
        derived: Option<Derived>,
    ) -> Self {
        let x = places[output].expect("forward has an output");
        let result = head.emit(&mut draft, x, route);
        let output = match route {
            Route::ForwardBackward => derived.and_then(|derived| derived.emit(&mut draft, places, result).1),
            _ => result,
        };
        let before: Vec<usize> = input.into_iter().collect();
        let after: Vec<usize> = output.into_iter().collect();
        let forward = List::new(draft.calls, &before, &after);
        Self {
            places: draft.places,
            input,
            sources: Vec::new(),
            forward,
            output,
            output_shared: false,
            kept: Vec::new(),
            keeps_products: false,
            backward: None,
        }
    }
}

impl HeadCall {
    /// Adds the calls of the head to the place `x`; returns the place of the logits, or of the gradient of `x`, if the
    /// route has one.
    pub(super) fn emit(self, draft: &mut Draft, x: usize, route: Route) -> Option<usize> {
        let HeadCall { dims, weight, trained, is_rounded, routers } = self;
        let rows = draft.places[x];
        let (losses, workspace) = ((Operand::Losses, false), Category::Workspace);
        let mut reads = vec![draft.whole(x), Operand::Param(weight)];
        let scratch = |dtype| Decl { rows: dims.chunk_rows, width: dims.vocab, dtype, category: workspace };
        match route {
            Route::Logits => {
                let decl =
                    Decl { rows: dims.rows, category: Category::Activation, ..scratch(rows.dtype.master()) };
                let logits = draft.place(decl);
                let writes = vec![(draft.whole(logits), false)];
                draft.call(Op::Head(Head::Logits { dims }), reads, writes);
                Some(logits)
            }
            Route::ForwardBackward => {
                reads.push(Operand::Targets);
                let dx = draft.place(Decl { category: Category::Activation, ..rows });
                let logits = draft.place(scratch(rows.dtype.master()));
                let mut writes = vec![losses, (draft.whole(logits), false), (draft.whole(dx), false)];
                writes.extend(trained.then_some((Operand::ParamGradient(weight), false)));
                if is_rounded {
                    let dlogits = draft.place(scratch(rows.dtype));
                    writes.push((draft.whole(dlogits), false));
                }
                writes.extend((dims.terms.z_loss > 0.0).then_some((Operand::ZLosses, false)));
                let op = Op::Head(Head::LossBackward { dims, weight: trained, is_rounded });
                draft.call(op, reads, writes);
                if let Some(terms) = routers.and_then(RouterTerms::balancing) {
                    let op = Op::Experts(Experts::BalanceLoss { terms });
                    draft.call(op, vec![Operand::Loads], vec![(Operand::RouterLoss, false)]);
                }
                Some(dx)
            }
            _ => {
                reads.push(Operand::Targets);
                let logits = draft.place(scratch(rows.dtype.master()));
                let writes = vec![losses, (draft.whole(logits), false)];
                // Evaluation uses the cross-entropy only.
                let dims = HeadDims { terms: LossTerms::default(), ..dims };
                draft.call(Op::Head(Head::Loss { dims }), reads, writes);
                None
            }
        }
    }
}
