package docs_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// TestPlatformsPage checks that docs/user/platforms.md has, for each platform that a local
// cluster imitates, a section with the commands that its story runs, those that it can't run, and why
// Tessera can't work there. Its table has a link to the profile, and why the platform lacks a part.
func TestPlatformsPage(t *testing.T) {
	page, err := os.ReadFile("user/platforms.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := platformSections(string(page))
	table, _, _ := strings.Cut(string(page), "<!-- end of platforms table -->")
	for _, name := range platform.Names() {
		p, err := platform.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		section, ok := sections[name]
		if !ok {
			t.Errorf(`the page has no line <a id="%s"></a> above a section for %s`, name, p.Title)
			continue
		}
		commands := p.Use.Before + p.HelmCommand("install", "REGISTRY/tessera")
		if p.Use.Cannot == "" && !strings.Contains(section, "```sh\n"+commands+"\n```\n") {
			t.Errorf("%s: the page doesn't have these commands as a block:\n%s", name, commands)
		}
		if p.Use.Setup != "" && !strings.Contains(section, "\n"+p.Use.Setup+"```\n") {
			t.Errorf("%s: the page doesn't have these lines as a block:\n%s", name, p.Use.Setup)
		}
		if !strings.Contains(oneLine(section), oneLine(p.Use.Cannot)) {
			t.Errorf("%s: its section doesn't say why Tessera can't work there: %s", name, p.Use.Cannot)
		}
		if link := "(../../sim/cluster/platform/profiles/" + name + ".yaml)"; !strings.Contains(table, link) {
			t.Errorf("%s: the table doesn't link the profile: %s", name, link)
		}
		for part, why := range p.Use.Lacks {
			if !strings.Contains(table, p.Title+": "+why) {
				t.Errorf("%s: the table doesn't say why it lacks %s: %s", name, part, why)
			}
		}
	}
}

// platformSections returns the text of each platform's section: from a line with its anchor,
// and perhaps those of others, to the next such line.
func platformSections(page string) map[string]string {
	line, anchor := regexp.MustCompile(`(?m)^(<a id="[^"]+"></a>)+$`), regexp.MustCompile(`id="([^"]+)"`)
	starts := line.FindAllStringIndex(page, -1)
	sections := map[string]string{}
	for i, at := range starts {
		end := len(page)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		for _, m := range anchor.FindAllStringSubmatch(page[at[0]:at[1]], -1) {
			sections[m[1]] = page[at[1]:end]
		}
	}
	return sections
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
