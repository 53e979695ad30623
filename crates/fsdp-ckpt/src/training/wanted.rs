//! What training looks for.

/// Name of the state that counts a parameter's steps. It is never one of the wanted state tensors.
pub(crate) const STEP: &str = "step";

/// A parameter to look for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its name, followed by alternative names.
    pub names: Vec<String>,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// The states that the optimizer keeps for it, with their shapes. A frozen parameter has none.
    pub states: Vec<(String, Vec<usize>)>,
    /// Whether weight decay applies to it: distinguishes the parameter groups of states that are keyed by number.
    pub decays: bool,
    /// Whether the optimizer may have none of these states, because it has never updated the parameter.
    pub may_lack_states: bool,
    /// Whether it belongs to the base of adapters: its weights are read elsewhere, whether they are here or not.
    pub is_base: bool,
}
