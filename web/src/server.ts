// SPDX-License-Identifier: Apache-2.0
// Sentences that the server makes (errors, refusals, verdicts, details of events), in Chinese. Each pattern is one
// sentence of services/ or db/; what is not known here is shown as it came.
import { currentLanguage } from "./i18n.ts";

const DURATION = "\\d[\\d.]* (?:h|min|s)(?: \\d[\\d.]* (?:min|s))*";

// Patterns stand for the whole text; ${n} is a group, and groups are translated again where marked with *.
const SENTENCES: readonly (readonly [RegExp, string])[] = [
  [/^out of memory$/, "内存不足"],
  [/^the sidecar is (?:stopping|shutting down)$/, "边车正在停止"],
  [/^there is no run with the id or name "(.*)"$/s, "没有编号或名称为“$1”的运行"],
  [/^there is no such (?:page|run|checkpoint)$/, "没有这个页面、运行或检查点"],
  [/^run "(.*)" is alive \((.*)\): end it before deleting it$/s, "运行“$1”还在进行（$2*）：请先结束再删除"],
  [/^run "(.*)" has no attempt (\d+): its newest is (\d+)$/s, "运行“$1”没有第 $2 次尝试：最新为第 $3 次"],
  [/^a token is needed: .*$/, "需要令牌：请登录"],
  [/^this token may only look$/, "此令牌只能查看"],
  [/^this token may not delete$/, "此令牌不能删除"],
  [/^changes are taken from the sidecar's own pages only; .*$/, "只接受来自边车自身页面的修改；在代理后面时请转发 Host 头"],
  [/^this name is not one of the sidecar's; .*$/, "该主机名不属于此边车；如应允许，请用 --allow-host 添加"],
  [/^too many event streams are open; .*$/, "打开的事件流过多；请关闭一些页面"],
  [/^the body is too large$/, "内容过长"],
  [/^notes: (\d+) bytes, at most (\d+) are allowed$/, "备注：$1 字节，最多 $2 字节"],
  [/^tags: (\d+), at most (\d+) are allowed$/, "标签：$1 个，最多 $2 个"],
  [/^tags\[(\d+)\]: must have 1 to (\d+) bytes$/, "标签 $1：长度须为 1 到 $2 字节"],
  [/^tags\[.*$/, "有标签不合规则"],
  [/^the disk is full: nothing was stored in (.*); free some space$/, "磁盘已满，$1 中没有存入任何内容；请腾出空间"],
  [/^the disk is full$/, "磁盘已满"],
  [/^sort: one of .*$/, "排序：没有这个列"],
  [/^(.*) is a published end mark without a curve$/s, "$1 是公开的终点，没有曲线"],
  [/^(.*) has no data hash recorded$/s, "$1 没有记录数据摘要"],
  [/^other data: hash (\S+), (.*) has (\S+)$/s, "数据不同：摘要 $1，$2 为 $3"],
  [/^(.*) has no model recorded$/s, "$1 没有记录模型"],
  [/^other model: (.*), (.*) has (.*)$/s, "模型不同：$1，$2 为 $3"],
  [/^other (\S+): (.*), (.*) has (.*)$/s, "$1 不同：$2，$3 为 $4"],
  [/^(.*) has no throughput recorded yet$/s, "$1 还没有记录吞吐"],
  [/^(.*) has no world size recorded$/s, "$1 没有记录进程数"],
  [/^(.*) has not reached ([\d.]+ ?%)$/s, "$1 还没有达到 $2"],
  [/^all (\d+) checks passed, n=(\d+)$/, "$1 项检查全部通过"],
  [/^run has finished: (.*); wanted: .*$/s, "运行尚未完成：$1*"],
  [/^(?:accuracy|best accuracy)(?: against baseline)?: (.*) \(epoch (\d+)\); wanted: at least ([\d.]+ %)(.*)$/s, "准确率：$1（第 $2 轮），要求不低于 $3"],
  [/^(?:accuracy|best accuracy)(?: against baseline)?: not known; wanted: at least ([\d.]+ %).*$/s, "准确率未知，要求不低于 $1"],
  [new RegExp(`^time to ([\\d.]+ %)(?: against baseline)?: (${DURATION}|never|not known)(.*); wanted: at most (${DURATION}).*$`, "s"), "达到 $1 用时：$2*，要求不超过 $4*"],
  [/^time to ([\d.]+ %) against baseline: (.*) did not; wanted: .*$/s, "基准 $2 没有达到 $1"],
  [new RegExp(`^total time of the run: (${DURATION}|not known)(.*); wanted: at most (${DURATION}).*$`, "s"), "总用时：$1*，要求不超过 $3*"],
  [/^baseline is comparable: (.*); wanted: .*$/s, "不可比较：$1*"],
  [/^evaluated: .*$/s, "没有评测结果"],
  [/^metrics are finite: (.*); wanted: .*$/s, "指标含有非数值：$1*"],
  [/^(train loss|val loss|accuracy) of epoch (\d+) is (.*)$/, "第 $2 轮的$1*为 $3"],
  [/^baseline is (.*)$/, "基准状态：$1*"],
  [/^epoch (\d+): train loss (\S+), loss (\S+), accuracy (\S+)$/, "第 $1 轮：训练损失 $2，验证损失 $3，准确率 $4"],
  [/^epoch (\d+): train loss (\S+)$/, "第 $1 轮：训练损失 $2"],
  [/^epoch (\d+): (.*), (\d+) bytes, sha256 (\S+)$/s, "第 $1 轮：$2，$3 字节，sha256 $4"],
  [/^checkpoint (\S+) deleted$/, "删除了检查点 $1"],
  [/^attempt (\d+), world size (\d+)$/, "第 $1 次尝试，$2 个进程"],
  [/^attempt (\d+) took over$/, "由第 $1 次尝试接替"],
  [/^(?:heard of again)$/, "恢复联系"],
  [/^not heard of for (.*)$/, "已 $1* 没有消息"],
  [/^created (.*) ago and never heard of$/, "创建 $1* 后一直没有消息"],
  [/^notes and tags$/, "备注与标签"],
  [/^notes$/, "备注"],
  [/^tags$/, "标签"],
  [/^pinned as the baseline$/, "设为基准"],
  [/^no longer the baseline$/, "不再是基准"],
  [/^running$/, "运行中"],
  [/^created$/, "已创建"],
  [/^finished$/, "已完成"],
  [/^failed$/, "失败"],
  [/^killed$/, "已终止"],
  [/^lost$/, "失联"],
  [/^not known$/, "未知"],
  [/^never$/, "从未"],
  [/^train loss$/, "训练损失"],
  [/^val loss$/, "验证损失"],
  [/^accuracy$/, "准确率"],
];

export function toChinese(text: string): string {
  if (new RegExp(`^${DURATION}$`).test(text)) return text.replace(/ h/g, " 时").replace(/ min/g, " 分").replace(/ s/g, " 秒");
  for (const [pattern, sentence] of SENTENCES) {
    const found = pattern.exec(text);
    if (found) return sentence.replace(/\$(\d)(\*?)/g, (_, index: string, again: string) => {
      const part = found[Number(index)] ?? "";
      return again ? toChinese(part) : part;
    });
  }
  return text;
}

export function serverText(text: string): string {
  return currentLanguage() === "zh" ? toChinese(text) : text;
}
