//! `cargo xtask tidy`: the rules of the tree that the compiler does not hold.
//!
//! - floors: a module of `dynalm` names only modules of lower floors (`floors.toml`); a crate depends only on those
//!   below it; some libraries and parts of `std` may be named in some places only,
//! - `unsafe` stands only in the listed places,
//! - every source file opens with `//!`, is at most 800 lines long, its functions at most 80,
//! - every `DYNALM_*` and `DYNACORE_*` variable in the sources is described in `docs/cli.md`.
//!
//! Sources are parsed with `syn`, so comments and strings do not count. Test modules and test files are exempt from
//! floors and the lists of libraries, not from sizes and `unsafe`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

#[derive(Deserialize)]
struct Floors {
    crates: BTreeMap<String, Vec<String>>,
    dynalm: BTreeMap<String, u32>,
    only: BTreeMap<String, Vec<String>>,
    never: BTreeMap<String, Vec<String>>,
    #[serde(rename = "unsafe")]
    unsafe_places: UnsafePlaces,
}

#[derive(Deserialize)]
struct UnsafePlaces {
    places: Vec<String>,
}

#[derive(Deserialize)]
struct Limits {
    max_file_lines: usize,
    max_function_lines: usize,
    long_files: BTreeMap<String, String>,
    long_functions: BTreeMap<String, String>,
}

/// Runs every check and fails with the list of findings.
pub(crate) fn run() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask lies in the workspace")?;
    let floors: Floors = toml::from_str(&std::fs::read_to_string(root.join("xtask/floors.toml"))?)?;
    let limits: Limits = toml::from_str(&std::fs::read_to_string(root.join("xtask/tidy.toml"))?)?;
    let mut findings = Vec::new();
    check_crates(root, &floors, &mut findings)?;
    let files = sources(root)?;
    let mut variables = BTreeSet::new();
    for path in &files {
        let name = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
        let text = std::fs::read_to_string(path).with_context(|| name.clone())?;
        check_file(&name, &text, &floors, &limits, &mut findings)?;
        collect_variables(&text, &mut variables);
    }
    let documented = std::fs::read_to_string(root.join("docs/cli.md")).unwrap_or_default();
    for v in variables.iter().filter(|v| !documented.contains(v.as_str())) {
        findings.push(format!(
            "docs/cli.md: variable {v} stands in the sources but not here"
        ));
    }
    if findings.is_empty() {
        println!("tidy: {} files in order", files.len());
        return Ok(());
    }
    for f in &findings {
        eprintln!("{f}");
    }
    bail!("tidy: {} findings", findings.len())
}

fn sources(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![root.join("crates"), root.join("xtask"), root.join("fuzz")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                if path
                    .file_name()
                    .is_none_or(|n| n != "target" && n != "node_modules")
                {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn check_crates(root: &Path, floors: &Floors, findings: &mut Vec<String>) -> anyhow::Result<()> {
    for (name, allowed) in &floors.crates {
        let path = root.join("crates").join(name).join("Cargo.toml");
        let manifest: toml::Table = std::fs::read_to_string(&path)?.parse()?;
        let Some(dependencies) = manifest.get("dependencies").and_then(|d| d.as_table()) else {
            continue;
        };
        for dependency in dependencies.keys() {
            if floors.crates.contains_key(dependency) && !allowed.contains(dependency) {
                findings.push(format!(
                    "crates/{name}/Cargo.toml: `{name}` must not depend on `{dependency}`"
                ));
            }
        }
    }
    Ok(())
}

fn check_file(
    name: &str,
    text: &str,
    floors: &Floors,
    limits: &Limits,
    findings: &mut Vec<String>,
) -> anyhow::Result<()> {
    let file = syn::parse_file(text).with_context(|| format!("{name} does not parse"))?;
    if !text
        .trim_start_matches("#!/usr/bin/env")
        .trim_start()
        .starts_with("//!")
    {
        findings.push(format!("{name}: does not open with `//!`"));
    }
    let lines = text.lines().count();
    if lines > limits.max_file_lines && !limits.long_files.contains_key(name) {
        findings.push(format!(
            "{name}: {lines} lines, at most {}",
            limits.max_file_lines
        ));
    }
    let test_file = name.contains("/tests/")
        || name.ends_with("/tests.rs")
        || name.contains("/benches/")
        || name.contains("/examples/")
        || name.starts_with("fuzz/")
        || name.starts_with("crates/testkit/");
    let mut found = Found {
        test: test_file,
        ..Found::default()
    };
    found.visit_file(&file);
    for (function, length, line) in &found.functions {
        let key = format!("{name}:{function}");
        if *length > limits.max_function_lines && !limits.long_functions.contains_key(&key) {
            let most = limits.max_function_lines;
            findings.push(format!(
                "{name}:{line}: function `{function}` has {length} lines, at most {most}"
            ));
        }
    }
    if let Some(line) = found.unsafe_line
        && !floors
            .unsafe_places
            .places
            .iter()
            .any(|p| name.starts_with(p.as_str()))
    {
        findings.push(format!("{name}:{line}: `unsafe` may not stand here"));
    }
    for (path, line) in &found.paths {
        check_path(name, path, *line, floors, findings);
    }
    Ok(())
}

fn check_path(name: &str, path: &[String], line: usize, floors: &Floors, findings: &mut Vec<String>) {
    let joined = path.join("::");
    let names = |what: &str| joined == what || joined.starts_with(&format!("{what}::"));
    for (what, places) in &floors.only {
        if names(what) && !places.iter().any(|p| name.starts_with(p.as_str())) {
            findings.push(format!(
                "{name}:{line}: `{what}` may be named only in {}",
                places.join(", ")
            ));
        }
    }
    for (place, things) in &floors.never {
        if name.starts_with(place.as_str()) {
            for what in things.iter().filter(|w| names(w)) {
                findings.push(format!("{name}:{line}: `{what}` must not be named here"));
            }
        }
    }
    let Some(inside) = name.strip_prefix("crates/dynalm/src/") else {
        return;
    };
    let module = inside.split(['/', '.']).next().unwrap_or_default();
    let target = match path.first().map(String::as_str) {
        Some("crate") => path.get(1),
        Some("dynalm") if module == "main" => path.get(1),
        _ => None,
    };
    let (Some(target), Some(own)) = (target, floors.dynalm.get(module)) else {
        return;
    };
    let Some(floor) = floors.dynalm.get(target.as_str()) else {
        // Re-exports of lib.rs (`crate::Error`) stand on the floor of `error`.
        return;
    };
    if target != module && floor >= own {
        findings.push(format!(
            "{name}:{line}: `{module}` (floor {own}) must not import `{target}` (floor {floor})"
        ));
    }
}

fn collect_variables(text: &str, out: &mut BTreeSet<String>) {
    for prefix in ["\"DYNALM_", "\"DYNACORE_"] {
        let mut rest = text;
        while let Some(at) = rest.find(prefix) {
            let word: String = rest[at + 1..]
                .chars()
                .take_while(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_')
                .collect();
            rest = &rest[at + prefix.len()..];
            if !word.ends_with('_') && !word.contains("TREADS") {
                out.insert(word);
            }
        }
    }
}

/// What one file holds that the rules speak of.
#[derive(Default)]
struct Found {
    paths: Vec<(Vec<String>, usize)>,
    functions: Vec<(String, usize, usize)>,
    unsafe_line: Option<usize>,
    test: bool,
}

impl Found {
    fn unsafe_at(&mut self, span: proc_macro2::Span) {
        self.unsafe_line.get_or_insert(span.start().line);
    }

    fn function(&mut self, name: &syn::Ident, block: &syn::Block) {
        let (start, end) = (block.span().start().line, block.span().end().line);
        self.functions
            .push((name.to_string(), end.saturating_sub(start) + 1, start));
    }

    fn use_tree(&mut self, tree: &syn::UseTree, prefix: &mut Vec<String>) {
        match tree {
            syn::UseTree::Path(p) => {
                prefix.push(p.ident.to_string());
                self.use_tree(&p.tree, prefix);
                prefix.pop();
            }
            syn::UseTree::Name(n) => self.use_leaf(&n.ident, prefix),
            syn::UseTree::Rename(r) => self.use_leaf(&r.ident, prefix),
            syn::UseTree::Glob(g) => self.paths.push((prefix.clone(), g.span().start().line)),
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| self.use_tree(t, prefix)),
        }
    }

    fn use_leaf(&mut self, ident: &syn::Ident, prefix: &[String]) {
        let mut path = prefix.to_vec();
        path.push(ident.to_string());
        self.paths.push((path, ident.span().start().line));
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| {
        a.path().is_ident("test")
            || (a.path().is_ident("cfg") && a.parse_args::<syn::Path>().is_ok_and(|p| p.is_ident("test")))
    })
}

impl<'a> Visit<'a> for Found {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        let outer = self.test;
        self.test |= is_test(&item.attrs);
        visit::visit_item_mod(self, item);
        self.test = outer;
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !self.test {
            self.use_tree(&item.tree, &mut Vec::new());
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if !self.test {
            let parts = path.segments.iter().map(|s| s.ident.to_string()).collect();
            self.paths.push((parts, path.span().start().line));
        }
        visit::visit_path(self, path);
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if item.sig.unsafety.is_some() {
            self.unsafe_at(item.span());
        }
        self.function(&item.sig.ident, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if item.sig.unsafety.is_some() {
            self.unsafe_at(item.span());
        }
        self.function(&item.sig.ident, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if item.unsafety.is_some() {
            self.unsafe_at(item.span());
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_unsafe(&mut self, expr: &'a syn::ExprUnsafe) {
        self.unsafe_at(expr.span());
        visit::visit_expr_unsafe(self, expr);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floors() -> Floors {
        toml::from_str(include_str!("../floors.toml")).expect("the table parses")
    }

    fn findings(name: &str, text: &str) -> Vec<String> {
        let limits = Limits {
            max_file_lines: 800,
            max_function_lines: 80,
            long_files: BTreeMap::new(),
            long_functions: BTreeMap::new(),
        };
        let mut out = Vec::new();
        check_file(name, text, &floors(), &limits, &mut out).expect("the text parses");
        out
    }

    #[test]
    fn an_upward_edge_is_found_in_uses_and_paths() {
        for text in [
            "//! x\nuse crate::server::run;",
            "//! x\nuse crate::{error::Error, cli};",
            "//! x\nfn f() { crate::engine::start() }",
        ] {
            let found = findings("crates/dynalm/src/kv/pool.rs", text);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains("must not import"), "{found:?}");
        }
        assert!(findings("crates/dynalm/src/cli/run.rs", "//! x\nuse crate::server::run;").is_empty());
        assert!(
            findings(
                "crates/dynalm/src/kv/pool.rs",
                "//! x\n#[cfg(test)]\nmod t { use crate::server::run; }"
            )
            .is_empty()
        );
    }

    #[test]
    fn libraries_unsafe_headers_and_sizes_are_held() {
        assert!(
            findings("crates/dynalm/src/engine/mod.rs", "//! x\nuse tokio::sync::mpsc;")[0].contains("tokio")
        );
        assert!(
            findings("crates/dynalm/src/sched/x.rs", "//! x\nuse std::time::Instant;")[0]
                .contains("std::time")
        );
        assert!(findings("crates/dynair/src/x.rs", "//! x\nfn f() { unsafe {} }")[0].contains("`unsafe`"));
        assert!(findings("crates/dynacore/src/mmap.rs", "//! x\nfn f() { unsafe {} }").is_empty());
        assert!(findings("crates/dynair/src/x.rs", "fn f() {}")[0].contains("`//!`"));
        let long = format!("//! x\nfn f() {{\n{}}}", "let _ = 1;\n".repeat(90));
        assert!(findings("crates/dynair/src/x.rs", &long)[0].contains("function `f` has 92 lines"));
        assert!(
            findings("crates/dynair/src/x.rs", &format!("//! x\n{}", "\n".repeat(900)))[0]
                .contains("901 lines")
        );
    }
}
