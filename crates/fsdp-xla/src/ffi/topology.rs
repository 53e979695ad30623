//! Devices that need not be here: what programs can be compiled for.

use std::path::Path;
use std::sync::Arc;

use super::api::{self, Arguments, Plugin, Word, attributes, text};
use super::client::{Client, program_of};
use super::executable::Compiled;
use super::options::{CompileOptions, Setting, Settings};
use crate::error::XlaError;

/// The attribute of devices with the bytes of memory that programs may use.
const MEMORY: &str = "device_memory_bytes_limit";

/// An arrangement of devices.
pub(crate) struct Topology {
    plugin: Arc<Plugin>,
    handle: Word,
    /// Whose it is; none for one that was made by its name.
    client: Option<Client>,
    /// How many devices it has.
    pub(crate) devices: usize,
    /// What the first one is.
    pub(crate) kind: String,
    /// Bytes of memory that programs may use on it, if the plugin says so.
    pub(crate) memory: Option<u64>,
}

impl Topology {
    /// The one with a name of the plugin's.
    ///
    /// # Errors
    /// What the plugin says: it may know no such name.
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
        Self { plugin, handle, client: None, devices: 0, kind: String::new(), memory: None }.described()
    }

    /// That of a client's devices.
    ///
    /// # Errors
    /// What the plugin says.
    pub(crate) fn of_client(client: Client) -> Result<Self, XlaError> {
        let plugin = Arc::clone(&client.plugin);
        let handle = plugin.call(api::CLIENT_TOPOLOGY, Arguments::new().set(2, client.handle))?.get(3);
        let client = Some(client);
        Self { plugin, handle, client, devices: 0, kind: String::new(), memory: None }.described()
    }

    /// With what the plugin says of its devices.
    fn described(mut self) -> Result<Self, XlaError> {
        let found = self.plugin.call(api::TOPOLOGY_DEVICES, Arguments::new().set(2, self.handle))?;
        self.devices = found.get(4);
        if self.devices == 0 {
            return Ok(self);
        }
        // SAFETY: the list has so many descriptions, which live as long as the topology.
        let first = unsafe { *(found.get(3) as *const Word) };
        let kind = self.plugin.call(api::DESCRIPTION_KIND, Arguments::new().set(2, first))?;
        // SAFETY: as above.
        self.kind = unsafe { text(kind.get(3), kind.get(4)) };
        let found = self.plugin.call(api::DESCRIPTION_ATTRIBUTES, Arguments::new().set(2, first))?;
        // SAFETY: there are so many of them, which live as long as the topology.
        let attributes = unsafe { attributes(found.get(4), found.get(3)) };
        self.memory = attributes.into_iter().find(|(name, _)| name == MEMORY).map(|(_, bytes)| bytes);
        Ok(self)
    }

    /// The plugin's library.
    pub(crate) fn path(&self) -> &Path {
        self.plugin.path()
    }

    /// Major and minor version of the plugin's API.
    pub(crate) fn api_version(&self) -> (i32, i32) {
        self.plugin.version()
    }

    /// Compiles a program of StableHLO text for the first of the devices.
    ///
    /// # Errors
    /// [`XlaError::Compile`], [`XlaError::Memory`].
    pub(crate) fn compile(&self, program: &str, options: &CompileOptions) -> Result<Compiled, XlaError> {
        let options = options.to_proto();
        let program = program_of(program);
        let client = self.client.as_ref().map_or(0, |client| client.handle);
        let arguments = Arguments::new()
            .set(2, self.handle)
            .pointer(3, program.as_ptr())
            .pointer(4, options.as_ptr())
            .set(5, options.len())
            .set(6, client);
        let compiled = self.plugin.call(api::COMPILE_AHEAD, arguments);
        let handle = compiled.map_err(|error| self.plugin.not_compiled(error))?.get(7);
        Ok(Compiled { plugin: Arc::clone(&self.plugin), handle })
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        if self.client.is_none() {
            // Nobody is left who could do something about it.
            let _ = self.plugin.call(api::TOPOLOGY_DESTROY, Arguments::new().set(2, self.handle));
        }
    }
}
