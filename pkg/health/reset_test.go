package health_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// tried returns a step in which a reset begins, and ends with an error unless that is
// nil.
func tried(err error, permanent bool) step {
	return func(_ *testing.T, s health.State, at time.Time) health.State {
		return s.BeginReset(at).EndReset(at.Add(time.Second), err, permanent)
	}
}

// begun is a reset that the end of the plugin interrupts.
func begun(_ *testing.T, s health.State, at time.Time) health.State { return s.BeginReset(at) }

// TestPlanReset checks whether the plugin resets a GPU now and, if not, whether the message
// says why. Steps are five seconds apart, and the decision is made a time after the first.
func TestPlanReset(t *testing.T) {
	const now, nothing = "now", "nothing"
	refused := errors.New("In use by another client")
	asks, drain := action(gpu.RecoveryReset), action(gpu.RecoveryDrainAndReset)
	may := health.ResetFacts{Allowed: true, Recovery: gpu.RecoveryReset}
	with := func(change func(*health.ResetFacts)) health.ResetFacts {
		x := may
		change(&x)
		return x
	}
	has := func(c gpu.ConditionType) health.ResetFacts {
		return with(func(x *health.ResetFacts) { x.Conditions = []gpu.Condition{{Type: gpu.ResetRequired}, {Type: c}} })
	}
	isUsed := with(func(x *health.ResetFacts) { x.Claims = []string{"default/d", "default/b", "default/a", "default/c"} })
	recovery := func(a gpu.RecoveryAction) health.ResetFacts {
		return with(func(x *health.ResetFacts) { x.Recovery = a })
	}
	for name, c := range map[string]struct {
		steps []step
		after time.Duration
		x     health.ResetFacts
		want  string
	}{
		"healthy":                        {nil, 0, may, nothing},
		"idle":                           {[]step{asks}, 0, may, now},
		"idle, drain and reset":          {[]step{drain}, 0, recovery(gpu.RecoveryDrainAndReset), now},
		"no policy":                      {[]step{asks}, 0, health.ResetFacts{GPU: "GPU-1", Recovery: gpu.RecoveryReset}, "nvidia-smi --gpu-reset -i GPU-1"},
		"used":                           {[]step{asks}, 0, isUsed, "when no claim has any of it; these have: default/a, default/b, default/c and 1 more"},
		"recovers":                       {[]step{asks}, 0, recovery(gpu.RecoveryNone), nothing},
		"ended by hand":                  {[]step{asks, byHand(gpu.ResetRequired)}, time.Minute, may, nothing},
		"by an XID, old driver":          {[]step{xid(95, gpu.RecoveryUnsupported)}, 0, recovery(gpu.RecoveryUnsupported), "doesn't say that a reset helps"},
		"something else is asked for":    {[]step{asks}, 0, recovery(gpu.RecoveryIMEX), "doesn't say that a reset helps"},
		"lost too":                       {[]step{asks}, 0, has(gpu.Lost), "the condition Lost, too"},
		"not responding too":             {[]step{asks}, 0, has(gpu.NotResponding), "the condition NotResponding, too"},
		"unreadable too":                 {[]step{asks}, 0, has(gpu.Unreadable), "the condition Unreadable, too"},
		"reboot too":                     {[]step{asks}, 0, has(gpu.RebootRequired), "the condition RebootRequired, too"},
		"bus reset too":                  {[]step{asks}, 0, has(gpu.BusResetRequired), "the condition BusResetRequired, too"},
		"peers too":                      {[]step{asks}, 0, has(gpu.PeersMustDrain), "the condition PeersMustDrain, too"},
		"who has it can't be read":       {[]step{asks}, 0, has(gpu.StateUnreadable), "the condition StateUnreadable, too"},
		"rows wait too":                  {[]step{asks}, 0, has(gpu.RowRemapPending), now},
		"links are down too":             {[]step{asks}, 0, has(gpu.NVLinkDown), now},
		"divided by others":              {[]step{asks}, 0, with(func(x *health.ResetFacts) { x.MIGOfOthers = true }), "a MIG configuration that Tessera didn't make"},
		"failed just now":                {[]step{asks, tried(refused, false)}, 30 * time.Second, may, "failed: In use by another client; Tessera tries again"},
		"failed a while ago":             {[]step{asks, tried(refused, false)}, 65 * time.Second, may, now},
		"failed, and used by now":        {[]step{asks, tried(refused, false)}, 65 * time.Second, isUsed, "when no claim has any of it"},
		"failed twice":                   {[]step{asks, tried(refused, false), tried(refused, false)}, 9 * time.Minute, may, "Tessera tries again"},
		"failed twice, long ago":         {[]step{asks, tried(refused, false), tried(refused, false)}, 11 * time.Minute, may, now},
		"failed three times":             {[]step{asks, tried(refused, false), tried(refused, false), tried(refused, false)}, 23 * time.Hour, may, "3 times in a day: the reset failed: In use by another client; reboot"},
		"failed three times yesterday":   {[]step{asks, tried(refused, false), tried(refused, false), tried(refused, false)}, 25 * time.Hour, may, now},
		"the clock was set back":         {[]step{asks, tried(refused, false), tried(refused, false), tried(refused, false)}, -time.Hour, may, now},
		"succeeded, asks again":          {[]step{asks, tried(nil, false)}, 30 * time.Second, may, "it was reset, and the driver asks again; Tessera tries again"},
		"reset again and again":          {[]step{asks, tried(nil, false), tried(nil, false), tried(nil, false)}, time.Hour, may, "3 times in a day"},
		"impossible":                     {[]step{asks, tried(errors.New("Not Supported"), true)}, time.Hour, may, "failed: Not Supported; end all programs"},
		"the plugin ended":               {[]step{asks, begun, restart}, 30 * time.Second, may, "the plugin ended while it reset the GPU; Tessera tries again"},
		"the plugin ended, a while ago":  {[]step{asks, begun, restart}, 65 * time.Second, may, now},
		"the plugin ended again and ...": {[]step{asks, begun, restart, begun, restart, begun, restart}, time.Hour, may, "3 times in a day"},
		"recovered, and asks again":      {[]step{asks, tried(nil, false), action(gpu.RecoveryNone), action(gpu.RecoveryNone), asks}, 30 * time.Second, may, "Tessera tries again"},
	} {
		t.Run(name, func(t *testing.T) {
			s := after(t, c.steps...)
			c.x.At = start.Add(c.after)
			plan := s.PlanReset(c.x)
			switch {
			case c.want == nothing && plan != health.ResetPlan{}, c.want == now && !plan.Now,
				c.want != nothing && c.want != now && (plan.Now || !strings.Contains(plan.Message, c.want)):
				t.Errorf("plan %+v, want %s", plan, c.want)
			}
		})
	}
}

// TestResetsAreForgotten checks that attempts leave nothing behind after a day.
func TestResetsAreForgotten(t *testing.T) {
	s := after(t, action(gpu.RecoveryReset), tried(nil, false), action(gpu.RecoveryNone), action(gpu.RecoveryNone))
	if len(s.Causes) > 0 || s.Equal(health.State{}) {
		t.Fatalf("after the reset: %+v", s)
	}
	s = s.Observe(health.Reading{At: start.Add(25 * time.Hour), Load: load, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryNone}})
	if !s.Equal(health.State{}) {
		t.Errorf("a day later: %+v", s)
	}
}
