package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestParse checks which blocks of a page are run, and how.
func TestParse(t *testing.T) {
	page := strings.ReplaceAll(`# A page
'''sh
kubectl get nodes
'''
<!-- another comment -->
'''text
no command
'''

<!-- not run: needs Docker -->

'''sh
docker push
'''
1. In a list:
   <!-- run with: NAME=nvidia.com -->
   <!-- run then: test -e file -->
   <!-- run first:
   touch file
   -->
   '''console
   $ kubectl get node NODE -o name |
     cat
   node/NODE
   $ kubectl gpu map MYNODE NAME
   '''
<!-- run for: 5s -->
'''sh
kubectl gpu web
'''
<!-- apply -->
'''yaml
kind: Pod
'''
<!-- not run from here: needs a cloud -->
'''sh
gcloud
'''
'''sh
az
'''
`, "'''", "```")
	got, err := parse(page)
	if err != nil {
		t.Fatal(err)
	}
	want := []block{
		{Line: 2, Script: "kubectl get nodes"},
		{Line: 12, Script: "docker push", LeftOut: "needs Docker"},
		{Line: 21, Script: "kubectl get node node-0 -o name |\n  cat\nkubectl gpu map MYNODE nvidia.com", First: "touch file", Then: "test -e file"},
		{Line: 28, Script: "kubectl gpu web", Ends: 5 * time.Second},
		{Line: 32, Script: "kubectl apply -f - <<'MANIFESTS'\nkind: Pod\nMANIFESTS"},
		{Line: 36, Script: "gcloud", LeftOut: "needs a cloud"},
		{Line: 39, Script: "az", LeftOut: "needs a cloud"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, page := range map[string]string{
		"no language":         "'''\nkubectl get nodes\n'''\n",
		"no fence":            "Do it:\n\n    kubectl get nodes\n",
		"mark without block":  "<!-- not run: because -->\ntext\n",
		"mark of a text":      "<!-- not run: because -->\n'''text\n'''\n",
		"unknown language":    "'''bash\nls\n'''\n",
		"mark without reason": "<!-- not run -->\n'''sh\ngcloud\n'''\n",
		"text behind a fence": "'''sh kubectl get pods\n'''\n",
		"rest without reason": "<!-- not run from here: -->\n'''sh\ngcloud\n'''\n",
		"duration of nothing": "<!-- run for: ever -->\n'''sh\nsleep\n'''\n",
	} {
		if blocks, err := parse(strings.ReplaceAll(page, "'''", "```")); err == nil {
			t.Errorf("%s: no error, and blocks %v", name, blocks)
		}
	}
}

// TestPages: every block of the pages for users says whether it is run.
func TestPages(t *testing.T) {
	t.Chdir("../..")
	files, err := pages("")
	if err != nil {
		t.Fatal(err)
	}
	run := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		blocks, err := parse(string(text))
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		for _, b := range blocks {
			if b.LeftOut == "" {
				run++
			}
		}
	}
	if len(files) < 8 || run < 10 {
		t.Errorf("of %d pages %d blocks are run: some aren't found", len(files), run)
	}
}
