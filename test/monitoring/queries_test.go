//go:build prometheus

package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

var keep = flag.Bool("keep", false, "leave the cluster up")

// patience is how long a query may take to have data, and the cluster to do something.
const patience = 3 * time.Minute

// check is a cluster with load, and a Prometheus that scrapes it.
type check struct {
	*stack.Stack
	*prometheus
}

// TestQueries runs every query of every dashboard, and the expression of every alert,
// and wants data of each. The cluster gets the trouble that they ask about.
func TestQueries(t *testing.T) {
	c := up(t, "prometheus", "8xh100-80gb", "2xa100-80gb,2xl40s,1xt4")
	c.load(t)
	c.rankNodes(t)
	c.has(t, "metrics of the leader only", `count(tessera_claims_waiting{type="gpu"}) == 1 and on () count(up{container="controller"} == 1) == 2`)
	t.Run("dashboards", func(t *testing.T) {
		files, err := filepath.Glob(chart + "/files/monitoring/dashboards/*.json")
		if err != nil || len(files) == 0 {
			t.Fatalf("no dashboards: %v", err)
		}
		for _, file := range files {
			for name, expr := range queries(t, file) {
				c.has(t, name, expr)
			}
		}
	})
	t.Run("page", func(t *testing.T) {
		for _, expr := range pageQueries(t) {
			c.has(t, page, expr)
		}
	})
	t.Run("alerts", func(t *testing.T) {
		exprs := alerts(t)
		const near, down, withdrawn, noController = "TesseraShareNearLimit", "TesseraPluginDown", "TesseraPoolWithdrawn", "TesseraControllerDown"
		// The plugin knows each GPU here, and so lists it whatever happens to it: the difference
		// stays 0. Rule tests have a GPU that was never identified.
		const unidentified = "TesseraGPUsNotIdentified"
		exprs[unidentified] = strings.TrimSuffix(strings.TrimSpace(exprs[unidentified]), " > 0")
		c.has(t, near, exprs[near]) // its program ends with the MPS daemons
		c.breakMore(t)
		for name, expr := range exprs {
			if !slices.Contains([]string{near, down, withdrawn, noController}, name) {
				c.has(t, name, expr)
			}
		}
		c.kubectl(t, "patch", "daemonset", "-n", stack.Namespace, "tessera-node", "--type=merge",
			"-p", `{"spec": {"template": {"spec": {"nodeSelector": {"nowhere": "true"}}}}}`)
		c.has(t, down, exprs[down])
		c.has(t, withdrawn, exprs[withdrawn]) // the kubelet deletes the slices of a driver that is gone
		c.kubectl(t, "scale", "deployment", "-n", stack.Namespace, "tessera-controller", "--replicas=0")
		c.has(t, noController, exprs[noController])
	})
}

// rankNodes switches ranks on, of which panels have metrics. It comes after the load: ranks would
// keep its pods off the node with the most GPUs.
func (c *check) rankNodes(t *testing.T) {
	t.Helper()
	out, err := c.Command(t.Context(), "helm", "upgrade", "tessera", chart, "--namespace", stack.Namespace,
		"--reuse-values", "--set", "packing.ranks=true", "--wait", "--timeout", "3m").CombinedOutput()
	if err != nil {
		t.Fatalf("helm upgrade: %v\n%s", err, out)
	}
}

// up brings the cluster up, and a Prometheus beside it that has the chart's rules and
// finds its targets as the chart's PodMonitor says.
func up(t *testing.T, name string, machines ...string) *check {
	t.Helper()
	monitoring := []string{"monitoring.podMonitor.enabled=true", "monitoring.rules.enabled=true", "monitoring.dashboards.enabled=true", "packing.ranks=true"}
	s, err := stack.Up(t.Context(), stack.Options{
		Name: name, Machines: machines, Out: os.Stderr,
		Values: []string{"crds.keep=false", "controller.replicas=2"},
	})
	if s != nil && !*keep {
		t.Cleanup(func() {
			if err := s.Down(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"template", "tessera", chart, "--namespace", stack.Namespace, "--set", "image.repository=none"}
	for _, value := range monitoring {
		args = append(args, "--set", value)
	}
	out, err := s.Command(t.Context(), "helm", args...).Output()
	if err != nil {
		t.Fatalf("helm template: %v", err)
	}
	c := &check{Stack: s}
	dir := credentials(t, s.Cluster)
	rules := filepath.Join(dir, "rules.yaml")
	var rule struct{ Spec json.RawMessage }
	if err := yaml.Unmarshal([]byte(object(t, string(out), "PrometheusRule")), &rule); err != nil {
		t.Fatal(err)
	}
	write(t, rules, string(rule.Spec))
	dcgm := httptest.NewServer(http.HandlerFunc(c.serveDCGM))
	t.Cleanup(dcgm.Close)
	c.prometheus = startPrometheus(t, configuration(t, rules,
		scrapeConfig(t, object(t, string(out), "PodMonitor"), s.Cluster.Server(), dir),
		map[string]any{"job_name": "dcgm", "static_configs": []any{map[string]any{"targets": []string{strings.TrimPrefix(dcgm.URL, "http://")}}}},
	))
	c.has(t, "plugins", fmt.Sprintf(`count(up{container="kubelet-plugin"} == 1) == %d`, len(machines)))
	return c
}

// object finds an object of a kind among those that Helm rendered.
func object(t *testing.T, rendered, kind string) string {
	t.Helper()
	for doc := range strings.SplitSeq(rendered, "\n---\n") {
		if strings.Contains(doc, "\nkind: "+kind+"\n") {
			return doc
		}
	}
	t.Fatalf("the chart has no %s", kind)
	return ""
}

// credentials writes an administrator's credentials to files, and returns their
// directory.
func credentials(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.KubeconfigPath())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, data := range map[string][]byte{"ca.crt": config.CAData, "client.crt": config.CertData, "client.key": config.KeyData} {
		write(t, filepath.Join(dir, name), string(data))
	}
	return dir
}

// serveDCGM answers as dcgm-exporter does, about the devices that claims have.
func (c *check) serveDCGM(w http.ResponseWriter, r *http.Request) {
	if c.prometheus == nil {
		return
	}
	devices, err := c.query(r.Context(), `group by (node, parent_uuid, gpu_instance_id, profile) (tessera_allocation_info{type=~"gpu|mig"})`)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	for i, field := range []string{"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_TEMP"} {
		fmt.Fprintf(w, "# TYPE %s gauge\n", field)
		for _, d := range devices {
			instance := ""
			if id := d.Metric["gpu_instance_id"]; id != "" {
				instance = fmt.Sprintf(`,GPU_I_PROFILE=%q,GPU_I_ID=%q`, d.Metric["profile"], id)
			}
			fmt.Fprintf(w, "%s{gpu=\"0\",UUID=%q,device=\"nvidia0\",modelName=\"NVIDIA H100 80GB HBM3\"%s,Hostname=%q} %d\n",
				field, d.Metric["parent_uuid"], instance, d.Metric["node"], 40+i)
		}
	}
}

// queries returns those of a dashboard, and those of its variables, by where they are.
func queries(t *testing.T, file string) map[string]string {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Type, Name, Query string }
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	found := map[string]string{}
	for _, v := range dashboard.Templating.List {
		if m := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(v.Query); m != nil {
			found[filepath.Base(file)+", variable "+v.Name] = fmt.Sprintf("group by (%s) (%s)", m[2], m[1])
		} else if v.Type != "datasource" {
			t.Errorf("%s: can't read the query of the variable %s: %s", file, v.Name, v.Query)
		}
	}
	variables := strings.NewReplacer("$node", ".*", "$__rate_interval", "30m")
	for _, p := range dashboard.Panels {
		for i, target := range p.Targets {
			found[fmt.Sprintf("%s, %s (%d)", filepath.Base(file), p.Title, i+1)] = variables.Replace(target.Expr)
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s: %s has no query", file, p.Title)
		}
	}
	return found
}

// alerts returns the expressions of the alerts, by name.
func alerts(t *testing.T) map[string]string {
	t.Helper()
	var rules struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert != "" {
				found[r.Alert] = r.Expr
			}
		}
	}
	if len(found) == 0 {
		t.Fatal("no alerts")
	}
	return found
}

// pageQueries returns the queries of the page for users, each in one line.
func pageQueries(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, block := range regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		found = append(found, oneLine(block[1]))
	}
	if len(found) == 0 {
		t.Fatalf("%s has no queries", page)
	}
	return found
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func (c *check) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// node runs a shell script on a node.
func (c *check) node(t *testing.T, node, script string) {
	t.Helper()
	if out, err := c.Cluster.Exec(t.Context(), node, "sh", "-c", script); err != nil {
		t.Fatalf("on %s: %s: %v\n%s", node, script, err, out)
	}
}

// until waits until kubectl prints something that matches.
func (c *check) until(t *testing.T, pattern string, args ...string) {
	t.Helper()
	await(t, "kubectl "+strings.Join(args, " "), func(ctx context.Context) error {
		out, err := c.Kubectl(ctx, args...)
		if err == nil && !regexp.MustCompile(pattern).MatchString(out) {
			err = errors.New(out)
		}
		return err
	})
}
