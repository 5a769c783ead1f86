// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manual pages of the daemon's command line, made from the definition of that command line.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};

use crate::shell::{Error, workspace};

#[expect(
    dead_code,
    reason = "the daemon reads what was typed; here it is about the looks"
)]
#[path = "../../daemon/src/cli.rs"]
mod cli;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where to [default: target/man]
    folder: Option<PathBuf>,
}

/// Writes `swanherd.1` and a page for each subcommand.
pub(crate) fn man(args: &Args) -> Result<u8, Error> {
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => workspace().join("target/man"),
    };
    fs::create_dir_all(&folder)?;
    let pages = pages()?;
    for (name, page) in &pages {
        fs::write(folder.join(name), page)?;
    }
    println!("{} pages in {}", pages.len(), shown(&folder));
    Ok(0)
}

fn shown(folder: &Path) -> String {
    folder.display().to_string()
}

/// File names and contents.
fn pages() -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut command = cli::Cli::command();
    // Gives each subcommand its full name.
    command.build();
    let mut pages = vec![page(&command)?];
    for subcommand in command.get_subcommands() {
        if subcommand.get_name() != "help" && !subcommand.is_hide_set() {
            pages.push(page(subcommand)?);
        }
    }
    Ok(pages)
}

fn page(command: &Command) -> Result<(String, Vec<u8>), Error> {
    let name = command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
        .to_owned();
    let command = command.clone().disable_help_subcommand(true);
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .title(name.to_uppercase())
        .section("1")
        .manual("swanherd")
        .render(&mut page)?;
    Ok((format!("{name}.1"), page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subcommand_has_a_page_that_tells_its_options() {
        let pages = pages().unwrap();
        let page = |name: &str| {
            let (_, page) = pages.iter().find(|(file, _)| file == name).unwrap();
            String::from_utf8(page.clone()).unwrap()
        };

        for name in [
            "swanherd.1",
            "swanherd-run.1",
            "swanherd-status.1",
            "swanherd-rekey.1",
        ] {
            let page = page(name);
            for part in [".TH ", ".SH NAME", ".SH SYNOPSIS", ".SH OPTIONS"] {
                assert!(page.contains(part), "no {part} in {name}:\n{page}");
            }
        }
        assert!(page("swanherd-rekey.1").contains("reauth"));
        assert!(page("swanherd.1").contains("swanherd\\-rekey(1)"));
        assert!(!pages.iter().any(|(name, _)| name.contains("help")));
    }
}
