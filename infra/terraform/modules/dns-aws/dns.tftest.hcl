provider "aws" {
  region = "eu-central-1"
}

variables {
  zone_id   = "Z1"
  zone_name = "mico.example.com"
  port      = 443
  gateways = {
    a = { endpoint = "a.elb.example.com", near = "eu-central-1" }
    b = { endpoint = "b.elb.example.com", near = "us-east-1", serves = false }
  }
}

run "names" {
  assert {
    condition = { for name, record in aws_route53_record.each : record.name => one(record.records) } == {
      "a.gateway.mico.example.com" = "a.elb.example.com", "b.gateway.mico.example.com" = "b.elb.example.com",
    }
    error_message = "a site can dial each gateway, also one that no client is sent to"
  }
  assert {
    condition = alltrue([
      keys(aws_route53_record.api) == ["a"], aws_route53_record.api["a"].name == "api.mico.example.com", aws_route53_record.api["a"].ttl == 30,
      aws_route53_record.api["a"].records == toset(["a.elb.example.com"]), aws_route53_record.api["a"].set_identifier == "a",
      aws_route53_record.api["a"].latency_routing_policy[0].region == "eu-central-1",
      aws_route53_record.api["a"].health_check_id == aws_route53_health_check.this["a"].id,
      output.url == "https://api.mico.example.com/v1",
    ])
    error_message = "clients are sent to the regions that serve"
  }
  assert {
    condition = alltrue([for name, check in aws_route53_health_check.this : alltrue([
      check.type == "HTTPS", check.fqdn == "${name}.gateway.mico.example.com", check.port == 443, check.resource_path == "/ready",
      check.enable_sni, check.request_interval == 10, check.failure_threshold == 2,
    ])])
    error_message = "a gateway that cannot serve is not named"
  }
}
