//! Rules from a TOML file.

use std::fs;
use std::ops::Range;
use std::path::Path;

use ninfer_core::WeightFormat;
use ninfer_core::format::{ActivationPrecision, GroupFormat};
use ninfer_core::shape::Part;
use serde::Deserialize;
use toml::Spanned;

use super::pattern::matches;
use super::{Conversion, Recipe, RowPart, Site, Target};
use crate::bridge::BridgeScale;
use crate::{Error, Result, TensorRole};

/// Largest file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// Recipe rules of your own, from a TOML file.
///
/// ```toml
/// base = "q4"            # a recipe that decides where no rule does; optional
/// default = "keep"       # for matrices that neither a rule nor the base touches; optional
///
/// [[rule]]               # the first rule that fits decides
/// role = ["attn.*", "gdn.out"]
/// layers = [0, 1, -1]    # only in these layers; negative ones count from the end
/// format = "w8"
///
/// [[rule]]
/// name = "model.layers.*.mlp.experts.*.down_proj"
/// format = "fp8-a8"
/// ```
///
/// A rule has `role` or `name` or both, each one pattern or a list of them, in which `*` stands for any characters and `?` for
/// one. Roles are those of [`TensorRole::name`]; rows of two matrices have names of their own: `attn.q.query`, `attn.q.gate`,
/// `gdn.qkv.query_key`, `gdn.qkv.value`. Names are those of checkpoints without the prefix of a wrapping model, with the number
/// of an expert written `*`: [`Site::name`]. A rule with roles only stays out of the MTP block unless `mtp = true`, or it is
/// for `mtp.fc` alone; one with names applies wherever they fit, within `mtp` if that is given.
///
/// | format | meaning |
/// |---|---|
/// | `keep` | as stored |
/// | `f32`, `f16`, `bf16`, `q4`, `q5`, `q6`, `w8`, `nvfp4`, `fp8-tensor`, `fp8`, `fp8-block` | encoded so |
/// | `bridge-fp8`, `bridge-fp8-block`, `bridge-fp8-amax` | converted by the bridge if stored as NVFP4, else as stored |
///
/// What is FP8 may have `-a8` behind it for E4M3 activations, and `nvfp4` may have `-a4` for E2M1 activations.
///
/// ```
/// use ninfer_core::{WeightFormat, shape::Part};
/// use ninfer_quant::{Custom, Recipe, Site, TensorRole};
/// let text = "base = 'q4'\n[[rule]]\nrole = 'mlp.*'\nlayers = [-1]\nformat = 'q6'\n";
/// let recipe = Recipe::from(Custom::parse("mine", text)?);
/// let format = |layer| {
///     let site = Site::new(TensorRole::MlpDown, Part::Layer(layer), 64, false);
///     recipe.target(&site, WeightFormat::Bf16).result(WeightFormat::Bf16).name()
/// };
/// assert_eq!((format(0), format(63)), ("q4", "q6"));
/// let error = Custom::parse("mine", "[[rule]]\nrole = 'mlp.gate'\nformat = 'q3'").unwrap_err();
/// assert!(error.to_string().starts_with("recipe mine, line 3: format \"q3\", known are keep, "));
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Custom {
    name: String,
    base: Recipe,
    default: Option<Format>,
    rules: Vec<Rule>,
}

impl Custom {
    /// Reads a file of at most 1 MiB; the recipe has its path as name.
    ///
    /// # Errors
    /// [`Error::RecipeFile`] if it cannot be read, and those of [`Custom::parse`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = path.display().to_string();
        let refuse = |reason: String| Error::RecipeFile { file: file.clone(), reason };
        let meta = fs::metadata(path).map_err(|e| refuse(e.to_string()))?;
        if !meta.is_file() {
            return Err(refuse("this is not a regular file".to_owned()));
        }
        if meta.len() > MAX_BYTES {
            return Err(refuse(format!("{} bytes are more than {MAX_BYTES}", meta.len())));
        }
        let text = fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
        Self::parse(&file, &text)
    }

    /// Reads rules from text; `name` is the recipe's name, and what errors call the file.
    ///
    /// # Errors
    /// [`Error::RecipeSyntax`] and [`Error::RecipeValue`] with the number of the line.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let reader = Reader { file: name, text };
        let file: File =
            toml::from_str(text).map_err(|e| reader.syntax(e.span().unwrap_or_default(), e.message().to_owned()))?;
        let base = file.base.map(|base| reader.recipe(&base)).transpose()?;
        let default = file.default.map(|format| reader.format(&format)).transpose()?;
        let rules = file.rule.iter().map(|rule| reader.rule(rule)).collect::<Result<Vec<_>>>()?;
        if rules.is_empty() && base.is_none() && default.is_none() {
            return Err(reader.syntax(0..0, "there is no rule, no base and no default".to_owned()));
        }
        Ok(Self { name: name.to_owned(), base: base.unwrap_or_default(), default, rules })
    }

    /// What it was called when it was read.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn decide(&self, site: &Site, stored: WeightFormat) -> Option<Target> {
        match self.rules.iter().find(|rule| rule.fits(site)) {
            Some(rule) => Some(rule.format.target()),
            None => self.base.decide(site, stored).or_else(|| self.default.as_ref().map(|format| format.target())),
        }
    }
}

impl From<Custom> for Recipe {
    fn from(custom: Custom) -> Self {
        Self::Custom(custom.into())
    }
}

/// What a rule makes of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Format {
    conversion: Conversion,
    activations: ActivationPrecision,
}

impl Format {
    const ALL: [(&'static str, Conversion); 15] = [
        ("keep", Conversion::Keep),
        ("f32", Conversion::To(WeightFormat::F32)),
        ("f16", Conversion::To(WeightFormat::F16)),
        ("bf16", Conversion::To(WeightFormat::Bf16)),
        ("q4", Conversion::To(WeightFormat::Group(GroupFormat::Q4))),
        ("q5", Conversion::To(WeightFormat::Group(GroupFormat::Q5))),
        ("q6", Conversion::To(WeightFormat::Group(GroupFormat::Q6))),
        ("w8", Conversion::To(WeightFormat::Group(GroupFormat::W8))),
        ("nvfp4", Conversion::To(WeightFormat::Nvfp4)),
        ("fp8-tensor", Conversion::To(WeightFormat::Fp8Tensor)),
        ("fp8", Conversion::To(WeightFormat::Fp8Row)),
        ("fp8-block", Conversion::To(WeightFormat::Fp8Block)),
        ("bridge-fp8", Conversion::Bridge(BridgeScale::Pow2Row)),
        ("bridge-fp8-block", Conversion::Bridge(BridgeScale::Pow2Block)),
        ("bridge-fp8-amax", Conversion::Bridge(BridgeScale::AmaxRow)),
    ];

    fn of(name: &str) -> Option<Self> {
        let coded = [("-a8", ActivationPrecision::E4m3Token), ("-a4", ActivationPrecision::E2m1Group16)];
        let coded = coded.into_iter().find_map(|(suffix, a)| name.strip_suffix(suffix).map(|name| (name, a)));
        let (name, activations) = coded.unwrap_or((name, ActivationPrecision::Native));
        let (_, conversion) = Self::ALL.into_iter().find(|(known, _)| *known == name)?;
        let fits = match conversion {
            Conversion::To(format) => activations.fits(format),
            Conversion::Keep => activations == ActivationPrecision::Native,
            Conversion::Bridge(_) => activations.fits(conversion.result(WeightFormat::Nvfp4)),
        };
        fits.then_some(Self { conversion, activations })
    }

    fn names() -> String {
        let with = |(name, _): (&str, Conversion)| {
            let names = ["", "-a8", "-a4"].map(|suffix| format!("{name}{suffix}"));
            names.into_iter().filter(|name| Self::of(name).is_some()).collect::<Vec<_>>().join(", ")
        };
        Self::ALL.map(with).join(", ")
    }

    fn target(self) -> Target {
        Target::from(self.conversion).with_activations(self.activations)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rule {
    roles: Vec<String>,
    names: Vec<String>,
    layers: Option<Vec<i64>>,
    mtp: Option<bool>,
    format: Format,
}

impl Rule {
    fn fits(&self, site: &Site) -> bool {
        let any = |patterns: &[String], text: &str| patterns.iter().any(|pattern| matches(pattern, text));
        let role = self.roles.is_empty() || role_names(site).iter().any(|name| any(&self.roles, name));
        let name = self.names.is_empty() || any(&self.names, &site.name());
        let mtp = self.mtp.is_none_or(|mtp| mtp == site.is_mtp());
        role && name && mtp && self.layers.as_ref().is_none_or(|layers| is_in(layers, site))
    }
}

/// The names that a role pattern may fit: that of the matrix, and that of the rows.
fn role_names(site: &Site) -> Vec<String> {
    let mut names = vec![site.role.name().to_owned()];
    if site.rows != RowPart::All {
        names.push(site.role_name());
    }
    names
}

fn is_in(layers: &[i64], site: &Site) -> bool {
    let Part::Layer(index) = site.place else { return false };
    let (index, count) = (index as i64, site.layers as i64);
    layers.iter().any(|&layer| layer == index || layer == index - count)
}

/// All names that a role pattern may fit.
fn known_roles() -> Vec<String> {
    let parts = [
        (TensorRole::AttnQ, RowPart::Query),
        (TensorRole::AttnQ, RowPart::Gate),
        (TensorRole::GdnQkv, RowPart::QueryKey),
        (TensorRole::GdnQkv, RowPart::Value),
    ];
    let mut names: Vec<String> = TensorRole::ALL.iter().map(|role| role.name().to_owned()).collect();
    names.extend(parts.map(|(role, rows)| Site::new(role, Part::Layer(0), 1, false).with_rows(rows).role_name()));
    names
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    base: Option<Spanned<String>>,
    default: Option<Spanned<String>>,
    #[serde(default)]
    rule: Vec<Spanned<FileRule>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRule {
    role: Option<Spanned<Patterns>>,
    name: Option<Spanned<Patterns>>,
    layers: Option<Vec<i64>>,
    mtp: Option<bool>,
    format: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

impl Patterns {
    fn list(&self) -> &[String] {
        match self {
            Self::One(pattern) => std::slice::from_ref(pattern),
            Self::Many(patterns) => patterns,
        }
    }
}

/// A file as errors see it.
struct Reader<'a> {
    file: &'a str,
    text: &'a str,
}

impl Reader<'_> {
    fn line(&self, span: Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..span.start).unwrap_or_default();
        before.iter().filter(|&&b| b == b'\n').count() + 1
    }

    fn syntax(&self, span: Range<usize>, reason: String) -> Error {
        Error::RecipeSyntax { file: self.file.to_owned(), line: self.line(span), reason }
    }

    fn value(&self, what: &'static str, span: Range<usize>, got: &str, known: String) -> Error {
        let (file, line) = (self.file.to_owned(), self.line(span));
        Error::RecipeValue { file, line, what, got: got.to_owned(), known }
    }

    fn recipe(&self, name: &Spanned<String>) -> Result<Recipe> {
        name.get_ref().parse().map_err(|_| self.value("base", name.span(), name.get_ref(), Recipe::names()))
    }

    fn format(&self, name: &Spanned<String>) -> Result<Format> {
        let unknown = || self.value("format", name.span(), name.get_ref(), Format::names());
        Format::of(name.get_ref()).ok_or_else(unknown)
    }

    fn rule(&self, rule: &Spanned<FileRule>) -> Result<Rule> {
        let (span, rule) = (rule.span(), rule.get_ref());
        let list = |patterns: &Option<Spanned<Patterns>>| {
            patterns.as_ref().map_or_else(Vec::new, |patterns| patterns.get_ref().list().to_vec())
        };
        let (roles, names) = (list(&rule.role), list(&rule.name));
        if roles.is_empty() && names.is_empty() {
            return Err(self.syntax(span, "the rule has neither a role nor a name".to_owned()));
        }
        let known = known_roles();
        let fits = |pattern: &String| known.iter().any(|role| matches(pattern, role));
        if let (Some(patterns), Some(bad)) = (&rule.role, roles.iter().find(|pattern| !fits(pattern))) {
            return Err(self.value("role", patterns.span(), bad, known.join(", ")));
        }
        let is_fc = |pattern: &String| pattern == TensorRole::MtpFc.name();
        let mtp = match (rule.mtp, names.is_empty()) {
            (None, true) => Some(roles.iter().all(is_fc)),
            (mtp, _) => mtp,
        };
        Ok(Rule { roles, names, layers: rule.layers.clone(), mtp, format: self.format(&rule.format)? })
    }
}
