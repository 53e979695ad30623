//! Topologies to compile programs for; the devices need not be present.

use std::path::Path;
use std::sync::Arc;

use super::api::{self, Arguments, Plugin, Word};
use super::client::{Client, program_of};
use super::description::DeviceKind;
use super::executable::Compiled;
use super::options::{CompileOptions, Setting, Settings};
use crate::error::XlaError;

/// A topology of devices.
pub(crate) struct Topology {
    plugin: Arc<Plugin>,
    handle: Word,
    /// The client that owns the topology; `None` for one created by name.
    client: Option<Client>,
    /// Number of devices.
    pub(crate) devices: usize,
    /// The kind of the first device.
    pub(crate) kind: DeviceKind,
}

impl Topology {
    /// Creates a topology by one of the plugin's names.
    ///
    /// # Errors
    /// Any error of the plugin; it may not know the name.
    pub(crate) fn named(
        plugin: Arc<Plugin>,
        name: &str,
        options: Vec<(String, Setting)>,
    ) -> Result<Self, XlaError> {
        let options = Settings::new(options);
        let arguments = Arguments::new()
            .pointer(2, name.as_ptr())
            .set(3, name.len())
            .pointer(4, options.words())
            .set(5, options.count());
        let handle = plugin.call(api::TOPOLOGY_CREATE, arguments)?.get(6);
        Self::from_handle(plugin, handle, None)
    }

    /// Returns the topology of a client's devices.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn of_client(client: Client) -> Result<Self, XlaError> {
        let plugin = Arc::clone(&client.plugin);
        let handle = plugin.call(api::CLIENT_TOPOLOGY, Arguments::new().set(2, client.handle))?.get(3);
        Self::from_handle(plugin, handle, Some(client))
    }

    /// Queries the device count and kind.
    fn from_handle(plugin: Arc<Plugin>, handle: Word, client: Option<Client>) -> Result<Self, XlaError> {
        let mut topology = Self { plugin, handle, client, devices: 0, kind: DeviceKind::default() };
        let found = topology.plugin.call(api::TOPOLOGY_DEVICES, Arguments::new().set(2, handle))?;
        topology.devices = found.get(4);
        if topology.devices > 0 {
            // SAFETY: the list has this many descriptions, which live as long as the topology.
            let first = unsafe { *(found.get(3) as *const Word) };
            topology.kind = DeviceKind::of(&topology.plugin, first)?;
        }
        Ok(topology)
    }

    /// The plugin's library.
    pub(crate) fn path(&self) -> &Path {
        self.plugin.path()
    }

    /// Major and minor version of the plugin's API.
    pub(crate) fn api_version(&self) -> (i32, i32) {
        self.plugin.version()
    }

    /// Compiles a program from StableHLO text for the first of the devices.
    ///
    /// # Errors
    /// [`XlaError::Compile`], [`XlaError::Memory`].
    pub(crate) fn compile(&self, program: &str, options: &CompileOptions) -> Result<Compiled, XlaError> {
        let (options, flags) = (options.to_proto(), &options.flags);
        let program = program_of(program);
        let client = self.client.as_ref().map_or(0, |client| client.handle);
        let arguments = Arguments::new()
            .set(2, self.handle)
            .pointer(3, program.as_ptr())
            .pointer(4, options.as_ptr())
            .set(5, options.len())
            .set(6, client);
        let compiled = self.plugin.call(api::COMPILE_AHEAD, arguments);
        let handle =
            compiled.map_err(|error| self.plugin.classify_compile_error(&self.kind, flags, error))?.get(7);
        Ok(Compiled { plugin: Arc::clone(&self.plugin), handle })
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        if self.client.is_none() {
            // An error here cannot be reported.
            let _ = self.plugin.call(api::TOPOLOGY_DESTROY, Arguments::new().set(2, self.handle));
        }
    }
}
