package docs_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// TestPlatformsPage checks that docs/user/platforms.md has, for each platform that a local
// cluster imitates, the commands that its story runs, those that it can't run, why Tessera can't work
// there, and a link to its profile.
func TestPlatformsPage(t *testing.T) {
	sections := platformSections(t)
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
		text := oneLine(section)
		for what, want := range map[string]string{"why Tessera can't work there": p.Use.Cannot, "a link to the profile": "(../../sim/cluster/platform/profiles/" + name + ".yaml)"} {
			if !strings.Contains(text, oneLine(want)) {
				t.Errorf("%s: the page lacks %s: %s", name, what, want)
			}
		}
		for part, why := range p.Use.Lacks {
			if !strings.Contains(strings.ToLower(text), strings.ToLower(oneLine(why))) {
				t.Errorf("%s: the page doesn't say why it lacks %s: %s", name, part, why)
			}
		}
	}
}

// platformSections returns the text of each platform's section: from a line with its anchor,
// and perhaps those of others, to the next such line.
func platformSections(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile("user/platforms.md")
	if err != nil {
		t.Fatal(err)
	}
	line, anchor := regexp.MustCompile(`(?m)^(<a id="[^"]+"></a>)+$`), regexp.MustCompile(`id="([^"]+)"`)
	starts := line.FindAllStringIndex(string(page), -1)
	sections := map[string]string{}
	for i, at := range starts {
		end := len(page)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		for _, m := range anchor.FindAllStringSubmatch(string(page[at[0]:at[1]]), -1) {
			sections[m[1]] = string(page[at[1]:end])
		}
	}
	return sections
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
