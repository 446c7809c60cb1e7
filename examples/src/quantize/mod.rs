//! Converting a checkpoint folder into another: planned from headers, streamed matrix by matrix, renamed into place at the end.

mod describe;
mod execute;
mod folder;
mod names;
mod plan;
mod summary;

use std::path::{Path, PathBuf};

use ninfer_models::checkpoint::CheckpointWriter;
use ninfer_models::weights::WeightTable;
use serde_json::{Value, json};

pub use self::execute::{Converted, Step};
pub use self::folder::Staging;
pub use self::plan::{Outcome, Piece, Plan};
pub use self::summary::Summary;
use crate::recipes::Recipes;
use crate::{Failure, Result};

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Job {
    /// The folder that is read.
    pub model: PathBuf,
    /// The folder that will be made.
    pub output: PathBuf,
    /// What happens to the matrices.
    pub recipes: Recipes,
    /// Most bytes of a file, unless one tensor has more.
    pub shard_bytes: u64,
    /// Whether an existing output may be replaced.
    pub force: bool,
}

impl Job {
    /// Opens the checkpoint and plans every tensor of the output. Nothing is written; of integer formats by other libraries
    /// the data is read, because it decides what they become.
    ///
    /// # Errors
    /// What the checkpoint reports; [`Failure::Models`] naming a matrix that its new format cannot hold.
    pub fn plan(&self) -> Result<Planned<'_>> {
        let table = WeightTable::open(&self.model)?;
        if table.container().is_some() {
            let message = format!("{} is a container", self.model.display());
            return Err(Failure::usage(message, "give a folder of safetensors files"));
        }
        let plan = Plan::new(&table, &self.recipes)?;
        Ok(Planned { job: self, table, plan })
    }
}

/// A job whose output is known.
#[derive(Debug)]
pub struct Planned<'a> {
    job: &'a Job,
    table: WeightTable,
    plan: Plan,
}

impl Planned<'_> {
    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes that will be read.
    #[must_use]
    pub fn input_bytes(&self) -> u64 {
        self.table.checkpoint().tensors().iter().map(ninfer_models::checkpoint::TensorEntry::bytes).sum()
    }

    /// The weight files that will be written, with their bytes.
    ///
    /// # Errors
    /// [`Failure::Models`] for two tensors of one name.
    pub fn files(&self) -> Result<Vec<(String, u64)>> {
        let writer = CheckpointWriter::create("", self.plan.tensors(), self.job.shard_bytes)?;
        Ok(writer.files().map(|(path, bytes)| (path.display().to_string(), bytes)).collect())
    }

    /// The `quantization_config` of the output; none where all weights are plain, or where nothing changes.
    #[must_use]
    pub fn quantization_config(&self) -> Option<Value> {
        describe::quantization_config(&self.table, &self.plan, &self.job.recipes)
    }

    /// Does it. `progress` is told of every matrix or tensor that is finished; where it fails, the job does.
    ///
    /// # Errors
    /// [`Failure::Exists`] for an output that is there already; [`Failure::Models`] for weights that are damaged, with the
    /// tensor's name, and for files that cannot be written; what `progress` reports. Nothing is left of the output then.
    pub fn run(&self, progress: &mut dyn FnMut(Step<'_>) -> Result<()>) -> Result<Summary> {
        let staging = Staging::open(&self.job.model, &self.job.output, self.job.force)?;
        let converted = self.write_to(staging.dir(), progress)?;
        staging.finish()?;
        Ok(Summary::new(converted))
    }

    /// Writes all files into a folder. The configuration comes last: without it the folder is no model.
    ///
    /// # Errors
    /// As [`Planned::run`].
    pub fn write_to(&self, dir: &Path, progress: &mut dyn FnMut(Step<'_>) -> Result<()>) -> Result<Vec<Converted>> {
        let mut writer = CheckpointWriter::create(dir, self.plan.tensors(), self.job.shard_bytes)?;
        let converted = execute::execute(&self.table, &self.plan, &self.job.recipes, &mut writer, progress)?;
        writer.finish()?;
        folder::copy_small_files(&self.job.model, dir, self.plan.is_copy())?;
        folder::write_file(&dir.join(CONFIG_FILE), &self.config()?)?;
        Ok(converted)
    }

    /// The bytes of the new `config.json`: the old ones, or the old object with another `quantization_config`.
    fn config(&self) -> Result<Vec<u8>> {
        let path = self.job.model.join(CONFIG_FILE);
        let text = std::fs::read(&path).map_err(|e| Failure::unreadable(&path, &e))?;
        if self.plan.is_copy() {
            return Ok(text);
        }
        let mut config: Value =
            serde_json::from_slice(&text).map_err(|error| Failure::content(&path, format!("not JSON: {error}")))?;
        let new = self.quantization_config();
        for section in ["text_config", ""] {
            let map = if section.is_empty() { Some(&mut config) } else { config.get_mut(section) };
            if let Some(Value::Object(map)) = map {
                map.shift_remove(describe::KEY);
            }
        }
        if let (Some(new), Value::Object(map)) = (new, &mut config) {
            map.insert(describe::KEY.to_owned(), new);
        }
        Ok(format!("{config:#}\n").into_bytes())
    }

    /// What a report says about the job.
    ///
    /// # Errors
    /// As [`Planned::files`].
    pub fn facts(&self) -> Result<Value> {
        let files: Vec<Value> =
            self.files()?.into_iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes })).collect();
        Ok(json!({
            "model": self.job.model,
            "output": self.job.output,
            "weights": self.job.recipes,
            "input_bytes": self.input_bytes(),
            "output_bytes": self.plan.output_bytes(),
            "files": files,
            "quantization_config": self.quantization_config(),
        }))
    }
}

const CONFIG_FILE: &str = "config.json";
